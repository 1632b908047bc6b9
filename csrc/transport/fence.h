// The fence transport: payload first, then one flag per peer with release order; the peer waits for the flag with
// acquire order and reads. This is its argument, for both columns, and its host side.
//
// A round is one dispatch or one combine. All ranks of a communicator issue the same sequence of rounds, numbered
// 1, 2, 3, ... Round n on rank s:
//   1. done      store n-1 into done[s] of every peer: "s has completed every round before n".
//   2. reuse     before the first byte that a slow peer might still need: wait until that peer has completed the last
//                round of the same kind (dispatch reuses the own stage and the rows of ids put at peers, combine
//                reuses landing slots at peers).
//   3. put       dispatch: own rows -> own stage, ids and weights -> peers. combine: partials -> peers' landing.
//   4. flag      header, then flag (n, kind) into slot [n mod 2][s] of every peer, release.
//   5. wait      for the flag of every peer in the own window, acquire.
//   6. get       dispatch: routed rows from peers' stages -> outputs. combine: reduce the own landing -> output.
//
// Why one set of stage, ids and landing is enough (and half the memory of two):
//   A flag of round m from peer p also says that p has completed every round before m. In the common sequence
//   dispatch, combine, dispatch, ... every rank that begins dispatch n has seen all flags of combine n-1, so every
//   peer has completed dispatch n-2: step 2 costs one comparison and never waits. Only when two rounds of one kind
//   follow each other (n-1 and n) is a word awaited that no flag implies: done >= n-1, which the peer posts as the
//   first thing in its round n, before it waits for anything. So no cycle of waits can form: step 2 of round n waits
//   for step 1 of round n, step 5 for step 4, and step 1 waits for nothing.
// Why two parities of flag and header are needed and enough:
//   A peer may be one round ahead of a rank that still waits for round n, since it needed only this rank's flag n. It
//   is never two ahead: for that it would need this rank's flag n+1.
// Example, W = 2, rank 1 slow, dispatch (round 1) then dispatch (round 2):
//   rank 0: stage A, flag 1, sees flag 1, gets, returns. Round 2: done[0] := 1 at rank 1; its own done[1] is 0 < 1:
//           waits, though its stage is its own memory, for rank 1 may still be reading A from it.
//   rank 1: sees flag 1, gets A, returns. Round 2: done[1] := 1 at rank 0.
//   rank 0: now writes B into its stage. Without step 2 rank 1 could have read B as round 1's rows.
//   (tests/test_protocol.py runs exactly this, with rank 1 held up between its flags and its gets.)
// A masked rank is neither sent to nor awaited, in any step.
#pragma once

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

#include "csrc/communicator.h"
#include "csrc/transport/host_wait.h"

namespace moe_ep {

// The sentences of the protocol's failures, for both columns. `field` as in header_field(), or -1: the op itself.
std::string disagreement_text(const Communicator& comm, OpKind kind, uint64_t round, int32_t peer, int32_t field,
                              int64_t mine, int64_t theirs);
std::string timeout_text(const Communicator& comm, OpKind kind, uint64_t round, int32_t peer, const std::string& what,
                         int64_t timeout_sec);
std::string unusable_text(const Communicator& comm, OpKind kind, const std::string& failure);

class HostFence {
 public:
  // Step 1. Throws when the communicator is in use by another thread or failed before.
  HostFence(Communicator& comm, OpKind kind, const RankMask& mask, int64_t timeout_sec)
      : comm_(comm), state_(comm.host()), kind_(kind), deadline_(timeout_sec) {
    const std::string failure = state_.failure();
    if (!failure.empty()) throw Error(unusable_text(comm, kind, failure));
    bool expected = false;
    if (!state_.busy.compare_exchange_strong(expected, true)) {
      throw ArgumentError(std::string(op_name(kind)) + ": communicator '" + comm.name() +
                          "' is in use by another thread; calls that run at once need two communicators");
    }
    round_ = ++state_.round;
    if (is_active(mask, comm.rank())) {
      for (int32_t i = 1; i < comm.ep_size(); ++i) {
        const int32_t peer = (comm.rank() + i) % comm.ep_size();  // staggered, so that ranks do not convoy
        if (is_active(mask, peer)) peers_[num_peers_++] = peer;
      }
    }
    for (const int32_t* p = begin(); p != end(); ++p) {
      store_release(comm.window(*p).done(comm.offsets(), comm.rank()), round_ - 1);
    }
  }
  ~HostFence() { state_.busy.store(false); }
  HostFence(const HostFence&) = delete;
  HostFence& operator=(const HostFence&) = delete;

  static bool is_active(const RankMask& mask, int32_t rank) { return mask.words[rank / 64] >> (rank % 64) & 1; }

  uint64_t round() const { return round_; }
  const int32_t* begin() const { return peers_; }  // the active peers, this rank not among them
  const int32_t* end() const { return peers_ + num_peers_; }

  void delay(DelayPoint point) const {
    const int64_t usec = comm_.delay_usec[static_cast<int>(point)].load(std::memory_order_relaxed);
    if (usec > 0) std::this_thread::sleep_for(std::chrono::microseconds(usec));
  }

  // Step 2.
  void await_reuse(int32_t peer) {
    const uint64_t last = state_.last_round[static_cast<int>(kind_)];
    if (last == 0 || state_.heard[static_cast<size_t>(peer)] > last) return;
    const uint64_t* word = own().done(comm_.offsets(), peer);
    wait([&] { return load_acquire(word) >= last; }, peer, "completion of its earlier " + std::string(op_name(kind_)));
  }

  // Step 4.
  void signal(int32_t peer, const StepHeader& header) {
    const Window window = comm_.window(peer);
    *window.header(comm_.offsets(), comm_.shape(), round_, comm_.rank()) = header;
    store_release(window.flag(comm_.offsets(), comm_.shape(), round_, comm_.rank()),
                  make_flag(round_, static_cast<int32_t>(kind_), header.tokens));
  }

  // Step 5. Calls arrived(peer, header) for each peer in order of arrival. A peer whose header does not agree with
  // `mine` is not passed on; once all have arrived the disagreement is thrown, so that the round is complete on every
  // rank and the communicator stays usable.
  template <class Arrived>
  void wait_all(const StepHeader& mine, const Arrived& arrived) {
    int32_t pending[kMaxRanks];
    int32_t num_pending = static_cast<int32_t>(std::copy(begin(), end(), pending) - pending);
    std::string disagreement;
    while (num_pending > 0) {
      int32_t found = -1;
      wait(
          [&] {
            for (int32_t i = 0; i < num_pending && found < 0; ++i) {
              if (flag_round(load_acquire(own_flag(pending[i]))) >= round_) found = i;
            }
            return found >= 0;
          },
          pending[0], "flag");
      const int32_t peer = pending[found];
      pending[found] = pending[--num_pending];
      state_.heard[static_cast<size_t>(peer)] = round_;
      const StepHeader& theirs = *own().header(comm_.offsets(), comm_.shape(), round_, peer);
      const std::string text = compare(mine, theirs, peer, flag_kind(*own_flag(peer)));
      if (!text.empty()) {
        disagreement = text;
      } else {
        arrived(peer, theirs);
      }
    }
    state_.last_round[static_cast<int>(kind_)] = round_;
    if (!disagreement.empty()) throw Error(disagreement);
  }

 private:
  Window own() const { return comm_.window(comm_.rank()); }
  const uint64_t* own_flag(int32_t peer) const { return own().flag(comm_.offsets(), comm_.shape(), round_, peer); }

  template <class Ready>
  void wait(const Ready& ready, int32_t peer, const std::string& what) {
    const WaitEnd end = spin_until(ready, deadline_);
    if (end == WaitEnd::kReady) return;
    const std::string failure = end == WaitEnd::kDeadline
                                    ? timeout_text(comm_, kind_, round_, peer, what, deadline_.timeout_sec)
                                    : std::string(op_name(kind_)) + " round " + std::to_string(round_) +
                                          " was interrupted while it waited for rank " + std::to_string(peer);
    state_.fail(failure);
    throw TimeoutError(failure);
  }

  // Empty when the two ranks agree about the step, else one sentence with both ranks and both values.
  std::string compare(const StepHeader& mine, const StepHeader& theirs, int32_t peer, int32_t their_kind) const;

  Communicator& comm_;
  Communicator::HostState& state_;
  OpKind kind_;
  Deadline deadline_;
  uint64_t round_ = 0;
  int32_t peers_[kMaxRanks];
  int32_t num_peers_ = 0;
};

}  // namespace moe_ep
