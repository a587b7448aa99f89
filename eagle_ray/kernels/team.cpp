// The team of team.h: helper threads that sleep, spin, or run a region next to the thread that began it.

#include "team.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace team {
namespace {

// How long a member spins before it yields its core.
constexpr std::chrono::microseconds SPIN(50);
// How long a member between two regions goes on yielding before it sleeps. The next region of a pass, or of the next step,
// comes within that time as a rule, and waking a member takes 0.1 ms in a virtual machine.
constexpr std::chrono::milliseconds LINGER(2);
constexpr int PAUSES = 32;  // between two looks at the clock

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Spins until is_over() or SPIN has passed; returns is_over().
template <typename Condition> bool spin(const Condition &is_over) {
    auto ends_at = std::chrono::steady_clock::now() + SPIN;
    do {
        for (int i = 0; i < PAUSES; i++) {
            if (is_over())
                return true;
            pause();
        }
    } while (std::chrono::steady_clock::now() < ends_at);
    return is_over();
}

// Waits until is_over() or LINGER has passed, and leaves the core to others that want it; returns is_over().
template <typename Condition> bool linger(const Condition &is_over) {
    auto ends_at = std::chrono::steady_clock::now() + LINGER;
    while (!spin(is_over)) {
        if (std::chrono::steady_clock::now() > ends_at)
            return false;
        sched_yield();
    }
    return true;
}

// A region is announced by one number, so that a helper reads its number and its size together.
constexpr int SIZE_BITS = 16;
constexpr int MOST = 1 << 10;  // members of a region

struct Helper {
    std::atomic<bool> is_asleep{false};
    std::condition_variable called;
};

class Team {
public:
    void run(int threads, Work work, const void *context) {
        int count = std::min(threads, MOST);
        if (count <= 1 || is_busy.exchange(true, std::memory_order_acquire)) {
            work(context, Member{0, 1});
            return;
        }
        count = std::min(count, 1 + helpers_for(count - 1));
        this->work = work;
        this->context = context;
        announced.store((((announced.load() >> SIZE_BITS) + 1) << SIZE_BITS) + count);
        wake(count);
        work(context, Member{0, count});
        barrier(count);
        is_busy.store(false, std::memory_order_release);
    }

    // count: the members of the region. Another region may have begun when a member that was the last but one goes on, so
    // nothing of the team but its two numbers is read here.
    void barrier(int count) {
        uint32_t mine = phase.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
            arrived.store(0, std::memory_order_relaxed);
            phase.store(mine + 1, std::memory_order_release);
            return;
        }
        auto is_over = [&] { return phase.load(std::memory_order_acquire) != mine; };
        while (!spin(is_over))
            sched_yield();
    }

private:
    // Starts helpers up to a number, and returns how many there are: fewer if the system gives no more threads.
    int helpers_for(int number) {
        while ((int)helpers.size() < number) {
            helpers.emplace_back();
            try {
                std::thread(&Team::help, this, (int)helpers.size(), &helpers.back(), announced.load()).detach();
            } catch (const std::system_error &) {
                helpers.pop_back();
                break;
            }
        }
        return std::min<int>(helpers.size(), number);
    }

    // What the index-th member does but for the first, who calls. A region that it is no member of does not wake it.
    void help(int index, Helper *own, uint64_t seen) {
        auto is_called = [&] {
            uint64_t now = announced.load();
            return now != seen && index < (int)(now & ((1 << SIZE_BITS) - 1));
        };
        while (true) {
            if (!linger(is_called)) {
                std::unique_lock<std::mutex> lock(mutex);
                own->is_asleep.store(true);
                own->called.wait(lock, is_called);
                own->is_asleep.store(false);
            }
            seen = announced.load();  // of the region that waits for this member
            int count = seen & ((1 << SIZE_BITS) - 1);
            work(context, Member{index, count});
            barrier(count);
        }
    }

    void wake(int count) {
        for (int i = 0; i < count - 1; i++) {
            if (!helpers[i].is_asleep.load())
                continue;
            {
                std::lock_guard<std::mutex> lock(mutex);
            }  // a helper that has looked and not yet slept holds it
            helpers[i].called.notify_one();
        }
    }

    // Each on a cache line of its own: members poll them.
    alignas(64) std::atomic<uint64_t> announced{0};
    alignas(64) std::atomic<uint32_t> phase{0};
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<bool> is_busy{false};
    std::deque<Helper> helpers;
    Work work = nullptr;
    const void *context = nullptr;
    std::mutex mutex;
};

std::atomic<Team *> team_of_process{nullptr};
std::once_flag forks;

// A child of fork() has none of the threads, and locks in any state: it gets a team of its own. The old one is left.
void forget() { team_of_process.store(nullptr); }

Team &the_team() {
    Team *team = team_of_process.load(std::memory_order_acquire);
    if (team)
        return *team;
    std::call_once(forks, [] { pthread_atfork(nullptr, nullptr, forget); });
    Team *made = new Team;  // never deleted: its threads end with the process
    if (!team_of_process.compare_exchange_strong(team, made)) {
        delete made;
        return *team;
    }
    return *made;
}

}  // namespace

void Member::barrier() const {
    if (count <= 1)
        return;
    if (is_in_team) {
        the_team().barrier(count);
    } else {
#pragma omp barrier
    }
}

void run(int threads, Work work, const void *context) { the_team().run(threads, work, context); }

}  // namespace team
