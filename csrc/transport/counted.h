// Counted writes (CFT): rows are pushed by the hardware, which adds the bytes that have landed to a counter beside
// them; the receiver awaits the counter. No rank stages a row, and no fence waits for one. What is small goes over the
// fence transport (csrc/transport/fence.h): ids, weights, header, flag. What is new is how rows travel.
//
// Round n of block b of rank s, in the steps of fence.h:
//   1, 2      as there.
//   3. put    ids and weights; then the total: how many bytes of rows block b of s has ever put at this peer, those of
//             round n included, into slot [b, s] of the peer.
//   4. flag   as there. It speaks for ids, weights and total, not for rows.
//   4b. rows  dispatch: own rows -> [s, t] of the target ranks; combine: partials -> landing of the sources. Each put
//             adds its bytes to counter [s, b] of the rank it goes to, as they land there, in any portions and order.
//   5. wait   for the flags; then, for every peer p, until counter [p, b] is at least the total that p told.
//   6. take   rows from the own window.
//   7. end    not before this block's own puts are complete.
//
// Why counters need no reset and no agreement about what came before:
//   The total is the sender's own sum since the window was made, kept in its device memory, so that graphs of any sizes
//   replay in any order. All that a block of s puts at a peer is added to one counter. When the counter has reached the
//   total of round n, every byte of rounds up to n has landed; and none of a later round can have been counted in place
//   of one of round n, for that block puts rows of round n+1 only after its kernel of round n has ended (7). A round in
//   which a rank mask cut s off, or in which the ranks disagreed, moves total and counter alike. 64 bits are 180 years
//   of puts at 3 TB/s.
// Why one slot for totals is enough, though a peer may be one round ahead (fence.h): its total of round n+1 may replace
//   that of round n, and this rank then awaits rows of round n+1 too. They come without its doing: a rank tells a total
//   only after it has waited for all that it waits for before it puts (2).
// Why the rows of a dispatch need one set only: fence.h, for they are reused as ids are; landing slots as there.
// Example, W = 2, rank 0 has two tokens of 32 bytes, both go to rank 1, in rounds 1 and 3 (2 is the combine), one
// block.
//   round 1: rank 0 tells the total 64 and puts two rows; rank 1 sees the flag and the total 64; its counter reads 0,
//            then 48 (the second row and half of the first), then 64: takes both rows.
//   round 2: rank 1 puts two partials at rank 0, total 64.
//   round 3: rank 0 tells 128; rank 1's counter reads 64: nothing of round 3 has landed; waits for 128.
//   tests/counted_model.py explores every order of these steps.
#pragma once

#include <cstdint>

namespace moe_ep {

constexpr int32_t kCountedBlocks = 256;  // counters per peer: thread blocks of a counted step, at most
constexpr int64_t kCounterBytes = 256;  // the hardware wants each counter, 8 bytes, on 256
constexpr int64_t kCountedAlignment = 16;  // of every put, and so of the bytes of a row

// How rows are pushed: by fabric.try_put.counted, or, for tests, by stores and a system-scope add.
enum class CountedPuts : int32_t { kNone = 0, kFabric = 1, kEmulated = 2 };

}  // namespace moe_ep
