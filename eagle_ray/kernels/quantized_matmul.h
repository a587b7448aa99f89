// The product of rounded rows and a quantised weight, as one step of a region of the team.

#pragma once

#include "rounded_rows.h"
#include "team.h"

// Computes the member's share of the outputs of all rows, in fp32: out = inputs @ weight.T + bias, or with `adds`
// out += that. Outputs of a row lie together. All rows have been rounded.
void multiply_share(const team::Member &member, float *out, bool adds, const Projection &projection,
                    const RoundedRows &inputs, int64_t rows);
