// Multiplies the rows of a file by its weight, for tests/kernels/test_arm.py, which runs it on an emulated ARM processor.
//
//     products INPUT OUTPUT PATH      a Path of quantized_matmul.cpp; -1: the best one of this processor, which is printed
//
// INPUT: inputs, outputs, group, bits, half_scales, rows, bytes of codes and of scales as int64; then codes, scales, rows.

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <vector>

#include "cpu_ops.h"

extern "C" int quantized_matmul_path();

int main(int, char **arguments) {
    std::ifstream in(arguments[1], std::ios::binary);
    int64_t sizes[8];
    in.read((char *)sizes, sizeof(sizes));
    std::vector<char> codes(sizes[6]), scales(sizes[7]);
    std::vector<float> rows(sizes[5] * sizes[0]), out(sizes[1]);
    in.read(codes.data(), codes.size());
    in.read(scales.data(), scales.size());
    in.read((char *)rows.data(), rows.size() * sizeof(float));

    int path = atoi(arguments[3]);
    if (path < 0)
        path = quantized_matmul_path();
    printf("%d\n", path);
    Weight weight = {sizes[0],      sizes[1],          sizes[2], sizes[3], (const uint8_t *)codes.data(),
                     scales.data(), (int32_t)sizes[4], path};
    std::ofstream to(arguments[2], std::ios::binary);
    for (int64_t count = 1; count <= sizes[5]; count++) {  // as many rows as there are, and fewer
        out.resize(count * sizes[1]);
        quantized_matmul_float32(out.data(), rows.data(), nullptr, &weight, count, 2);
        to.write((const char *)out.data(), out.size() * sizeof(float));
    }
}
