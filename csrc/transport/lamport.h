// The Lamport transport, for small steps on a GPU: put only. Everything travels in vectors of 16 bytes, 12 of payload
// and 4 of tag, the low 32 bits of the round. A vector is stored and loaded by one 128-bit access, which is single-copy
// atomic (PTX memory model), so a vector whose tag is that of the round has arrived whole. No rank waits for a
// completion flag, none issues a fence, nothing is cleared, and every payload arrives as it is: there is no value that
// stands for "not yet there".
//
// Round n on rank s, in the one kernel of the op:
//   1. header    a few vectors to every peer: what s says of its step. Block 0 awaits those of all peers before it
//   ends.
//   2. put       dispatch: ids and weights of all R tokens (none for t >= T) to every peer; the row of token t to the
//                ranks that own one of its experts, at [s, t]. combine: the partial of token t to its source, at
//                [t, index of s among the token's targets].
//   3. take      poll what must come until its tag is right. dispatch: the ids of (source, token) tell whether a row
//                comes. combine: `routing` tells which partials come. Rows of the own rank never touch a window.
//
// Why two sets of landing memory, by the parity of the round, are needed and enough:
//   A rank that is in round n+1 has ended round n, so it has the header of round n of every peer, so every peer has
//   begun round n and completed round n-1. It writes set (n+1) mod 2, which its peers read last in round n-1. With one
//   set it would write what a peer in round n is still reading. Rounds of the fence transport in between make no
//   difference: they too end only after every peer was heard.
// Why the tag must be the round and not one bit of it:
//   A row is put only where it is needed. The vectors at [s, t] may have been written last 2, 4 or 4000 rounds ago.
//   After 2^32 rounds tags repeat; a vector that old is one that was never overwritten in eight hours of rounds.
// Why the header is needed although rows carry their own arrival:
//   Where no row is routed, nobody would wait: a rank could run ahead of a slow peer by any number of rounds.
// Example, W = 2, one token on rank 0 that goes to rank 1, none on rank 1; rank 1 is slow.
//   rank 0: round 1, dispatch: header, ids and row into set 1 of rank 1; awaits header 1 of rank 1.
//   rank 1: header 1; is held up before it takes the row.
//   rank 0: has header 1; ends. Round 2, dispatch: header, ids and row into set 0; awaits header 2, which does not come
//           before rank 1 has taken the row of round 1. Without headers rank 0 would go on, and round 3 would overwrite
//           set 1 under rank 1's eyes: vectors of the tags 1 and 3 in one row, and the former lost.
//   tests/lamport_model.py explores every order of these steps for three ranks and three rounds.
// A masked rank is neither sent to nor awaited. It may then lag or run ahead unseen, so with rank masks every rank also
// posts a done word at the beginning of a round (round n: n-1 is completed) and awaits that n-2 is completed before it
// puts anything.
#pragma once

#include <cstdint>

#include "csrc/fp8.h"

namespace moe_ep {

struct alignas(16) LamportVector {
  uint32_t word[3];
  uint32_t tag;
};
static_assert(sizeof(LamportVector) == 16);

constexpr int32_t kLamportWords = 3;  // of payload in a vector
constexpr int32_t kLamportMaxRanks = 64;  // target ranks of a token are a 64-bit mask
constexpr int32_t kLamportHeaderVectors = 6;  // a StepHeader and the op kind: 17 words

MOE_EP_HD uint32_t lamport_tag(uint64_t round) { return static_cast<uint32_t>(round); }

// Rows of a dispatch are cut into groups of 96 units of 16 bytes. Lane l of a warp holds units l, 32 + l and 64 + l of
// a group, which are 12 words; vector i of them travels as vector 32 i + l of the group's 128. So both sides move whole
// units, and no word changes lanes.
constexpr int32_t kLamportGroupUnits = 96;
MOE_EP_HD int64_t lamport_groups(int64_t units) { return (units + kLamportGroupUnits - 1) / kLamportGroupUnits; }
// Vectors of a lane that holds the first `units` units of its three: 4 words each.
MOE_EP_HD int32_t lamport_lane_vectors(int32_t units) { return (4 * units + kLamportWords - 1) / kLamportWords; }

// Plain rows of words (ids and weights, partials) travel three words to a vector.
MOE_EP_HD int64_t lamport_vectors(int64_t bytes) { return (bytes + 4 * kLamportWords - 1) / (4 * kLamportWords); }

}  // namespace moe_ep
