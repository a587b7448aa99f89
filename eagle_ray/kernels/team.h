// The threads of this process that compute together on a CPU: one team, whichever engines there are.
//
// A region is a function that every member of the team runs at once, each with its share of the work:
//
//     team::run(threads, [&](const team::Member &member) {
//         for (int64_t row : member.share(rows)) ...
//         member.barrier();                              // what others wrote is there now
//         ...
//     });
//
// A pass over a model is one region with a barrier between its steps. Waiting members spin for a bounded time and then
// yield, so that another process on the same core delays them by its own time and not by a multiple of it. Between
// regions members wait in the same way for the next one, and fall asleep after 2 ms. While one thread of the process is in a region, another thread's region runs on that
// thread alone: two engines never have more threads than the team has.

#pragma once

#include <cstdint>

namespace team {

// The numbers [first, last), for a range-based loop.
struct Span {
    struct Iterator {
        int64_t at;
        int64_t operator*() const { return at; }
        void operator++() { at++; }
        bool operator!=(const Iterator &other) const { return at != other.at; }
    };
    int64_t first, last;
    Iterator begin() const { return {first}; }
    Iterator end() const { return {last}; }
};

// One thread's part in a region: the index-th of `count`, in a region of the team or of OpenMP (parallel.h).
struct Member {
    int index, count;
    bool is_in_team = true;

    // The member's part of `pieces` pieces: parts differ by one piece at most.
    Span share(int64_t pieces) const { return {pieces * index / count, pieces * (index + 1) / count}; }

    // Returns once all members of the region are here.
    void barrier() const;
};

using Work = void (*)(const void *context, const Member &member);

// Runs work with at most `threads` members, of which the calling thread is one. Returns once all have ended.
void run(int threads, Work work, const void *context);

template <typename Function> void run(int threads, const Function &function) {
    run(threads, [](const void *context, const Member &member) { (*(const Function *)context)(member); }, &function);
}

}  // namespace team
