// Multiplies the rows of a file by its dense weight, for tests/kernels/test_arm.py, which runs it on an emulated ARM
// processor.
//
//     dense INPUT OUTPUT      the Path of dense_matmul.cpp that this processor takes is printed
//
// INPUT: inputs, outputs, is_bf16, rows, bytes of weights and of rows as int64; then weights and rows.

#include <cstdio>
#include <fstream>
#include <vector>

#include "cpu_ops.h"

extern "C" int dense_matmul_path();

int main(int, char **arguments) {
    std::ifstream in(arguments[1], std::ios::binary);
    int64_t sizes[6];
    in.read((char *)sizes, sizeof(sizes));
    std::vector<char> weights(sizes[4]), rows(sizes[5]);
    in.read(weights.data(), weights.size());
    in.read(rows.data(), rows.size());

    int path = dense_matmul_path();
    printf("%d\n", path);
    DenseWeight weight = {sizes[0], sizes[1], weights.data(), (int32_t)sizes[2], path};
    std::ofstream to(arguments[2], std::ios::binary);
    for (int64_t count = 1; count <= sizes[3]; count++) {  // as many rows as there are, and fewer
        std::vector<char> out(count * sizes[1] * (sizes[2] ? 2 : 4));
        if (sizes[2])
            dense_matmul_bfloat16((bf16 *)out.data(), (const bf16 *)rows.data(), nullptr, &weight, count, 2);
        else
            dense_matmul_float32((float *)out.data(), (const float *)rows.data(), nullptr, &weight, count, 2);
        to.write(out.data(), out.size());
    }
}
