// Runs one function in several threads at once: those of the team (team.h), or OpenMP's.
//
// An engine whose products are all of this library, those of quantised weights, computes in the team. Where torch
// multiplies, too, everything runs in OpenMP's threads, as torch does: two sets of threads on the same cores would wait
// for each other.

#pragma once

#include <omp.h>

#include "team.h"

// Whether the calling thread computes in the team; see join_team.
extern thread_local bool uses_team;

// Runs function(member) with at most `threads` members.
template <typename Function> void parallel(int threads, const Function &function) {
    if (threads <= 1) {
        function(team::Member{0, 1});
    } else if (uses_team) {
        team::run(threads, function);
    } else {
#pragma omp parallel num_threads(threads)
        function(team::Member{omp_get_thread_num(), omp_get_num_threads(), false});
    }
}
