// The border between ops/ (which sees torch) and csrc/ (which does not): one struct per op, plain pointers, no
// torch, no Python.
//
// Legend, used in every room:
//   T  local tokens of this rank         K  top-k                       H  hidden size
//   E  experts                           W  ep_size, ranks              R  tokens_per_rank of this step
//   C  max_tokens_per_rank (capacity)    B  bytes of one dispatched row M  min(K, W), most targets of a token
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace moe_ep {

constexpr int kMaxTopK = 32;
constexpr int kMaxRanks = 256;
constexpr int kMaskWords = kMaxRanks / 64;

// Raised for every failure below ops/; the text is meant for the person who called the op.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// A wait on a peer outlived its deadline. The communicator cannot be used again.
struct TimeoutError : Error {
  using Error::Error;
};
// An argument does not fit the communicator. Nothing was sent, the communicator is as it was.
struct ArgumentError : Error {
  using Error::Error;
};

enum class OpKind : int32_t { kDispatch = 1, kCombine = 2 };
// A step is one op, or two: a start that sends and a wait that takes (csrc/transport/fence.h).
enum class Phase : int32_t { kWhole = 0, kStart = 1, kWait = 2 };
enum class DeviceKind : int32_t { kCpu = 0, kCuda = 1 };
enum class ElementType : int32_t { kBFloat16, kFloat16, kFloat32, kFloat64 };

// How combine's partials travel: as they are, or as FP8 (e4m3) with a float32 scale per block of elements (csrc/fp8.h),
// or as FP8 without scales (saturating at 448).
enum class CombineWire : int32_t { kRows = 0, kFp8 = 1, kFp8Plain = 2 };

inline int64_t element_size(ElementType type) {
  return type == ElementType::kFloat64 ? 8 : type == ElementType::kFloat32 ? 4 : 2;
}
inline const char* op_name(OpKind kind, Phase phase = Phase::kWhole) {
  static const char* const kNames[2][3] = {{"dispatch", "dispatch_start", "dispatch_wait"},
                                           {"combine", "combine_start", "combine_wait"}};
  return kNames[kind == OpKind::kDispatch ? 0 : 1][static_cast<int32_t>(phase)];
}

// A strided row tensor: row i starts at data + i * stride, its bytes are contiguous.
struct Rows {
  const char* data = nullptr;
  int64_t stride = 0;  // bytes between rows
  int64_t bytes = 0;   // bytes of one row; 0 = this payload is absent
};

struct RankMask {
  bool given = false;
  uint64_t words[kMaskWords] = {};
};

struct DispatchArgs {
  Phase phase = Phase::kWhole;
  int64_t* pending = nullptr;       // [1] written by a start, read by its wait: the round
  // inputs
  Rows hidden;                      // [T] rows of B bytes
  Rows scale;                       // [T] rows
  Rows weights;                     // [T] rows of K * weight_itemsize bytes
  const void* topk_ids = nullptr;   // [T, K] int32 or int64
  int64_t ids_row_stride = 0;       // elements
  int64_t ids_col_stride = 0;       // elements
  bool ids_are_int64 = false;
  const int32_t* eplb = nullptr;    // [n]
  int32_t num_eplb = 0;             // n
  int32_t num_tokens = 0;           // T
  int32_t top_k = 0;                // K
  int32_t tokens_per_rank = 0;      // R
  int32_t num_experts = 0;          // E
  int32_t invalid_expert_id = -1;
  int64_t timeout_sec = 300;
  RankMask mask;
  // outputs, all contiguous; a start has none
  char* out_hidden = nullptr;       // [W*R] rows of hidden.bytes
  char* out_scale = nullptr;        // [W*R] rows of scale.bytes
  char* out_weights = nullptr;      // [W*R] rows of weights.bytes
  int32_t* out_topk_ids = nullptr;  // [W*R, K]
  int32_t* out_eplb = nullptr;      // [W, n]
  int32_t* routing = nullptr;       // [1 + W + M, R], see csrc/routing.h
};

struct CombineArgs {
  Phase phase = Phase::kWhole;
  int64_t* pending = nullptr;       // [1] written by a start, read by its wait: the round
  Rows expert_output;               // [W*R] rows of H elements
  const int32_t* routing = nullptr; // [1 + W + M, R]
  int32_t max_targets = 0;          // M of the dispatch that made `routing`
  int32_t num_tokens = 0;           // T
  int32_t tokens_per_rank = 0;      // R
  int64_t hidden_size = 0;          // H
  ElementType element_type = ElementType::kBFloat16;
  bool plain_fp8 = false;           // an FP8 wire without scales; set by the column
  int64_t timeout_sec = 300;
  RankMask mask;
  char* out = nullptr;              // [T] rows of H elements; a start has none
  int64_t out_stride = 0;           // bytes between rows of out
};

class Communicator;

namespace cpu {
void dispatch(Communicator& comm, const DispatchArgs& args);
void combine(Communicator& comm, const CombineArgs& args);
}  // namespace cpu

}  // namespace moe_ep
