// How a host thread stores to, loads from and waits on a word that another process writes.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace moe_ep {

static_assert(std::atomic_ref<uint64_t>::is_always_lock_free, "flags are shared between processes");

inline void store_release(uint64_t* word, uint64_t value) {
  std::atomic_ref<uint64_t>(*word).store(value, std::memory_order_release);
}
inline uint64_t load_acquire(const uint64_t* word) {
  return std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(word)).load(std::memory_order_acquire);
}

struct Deadline {
  // More than 30 years are 30 years: the clock counts nanoseconds in 64 bits.
  explicit Deadline(int64_t seconds)
      : timeout_sec(seconds),
        at(std::chrono::steady_clock::now() + std::chrono::seconds(std::min<int64_t>(seconds, 1'000'000'000))) {}
  int64_t timeout_sec;
  std::chrono::steady_clock::time_point at;
};

// Asked now and then by a long wait: whether the person at the keyboard wants it to end. Null: nobody asks.
using InterruptCheck = bool (*)();
std::atomic<InterruptCheck>& interrupt_check();

enum class WaitEnd { kReady, kDeadline, kInterrupt };

// Spins shortly, then yields (ranks may outnumber cores), then naps (a peer may be minutes away). False once the
// deadline has passed.
template <class Ready>
WaitEnd spin_until(const Ready& ready, const Deadline& deadline) {
  constexpr int kSpins = 64, kYields = 4096;
  for (int64_t i = 0;; ++i) {
    if (ready()) return WaitEnd::kReady;
    if (i < kSpins) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
      continue;
    }
    if (i < kSpins + kYields) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    if (i % 64 == 0 && std::chrono::steady_clock::now() > deadline.at) {
      return ready() ? WaitEnd::kReady : WaitEnd::kDeadline;
    }
    if (i > kSpins + kYields && i % 1024 == 0) {
      const InterruptCheck interrupted = interrupt_check().load();
      if (interrupted != nullptr && interrupted()) return WaitEnd::kInterrupt;
    }
  }
}

}  // namespace moe_ep
