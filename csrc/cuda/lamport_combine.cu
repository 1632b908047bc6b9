// combine over the Lamport transport (csrc/transport/lamport.h): one kernel, a warp per piece of work.
//
// Put: (W - 1) * R * chunks pieces: 32 * kPut vectors of the partial of a received row, to the row's source, if this
// rank holds that row. Take: T * chunks pieces: 32 vectors of an own token, of all its targets; summed in the order of
// the targets (csrc/cuda/sum.cuh), its own partial straight from expert_output.
#include <algorithm>

#include "csrc/cuda/device.cuh"
#include "csrc/cuda/launch.cuh"
#include "csrc/cuda/launch.h"
#include "csrc/cuda/sum.cuh"
#include "csrc/limits.h"
#include "csrc/transport/lamport.cuh"

namespace moe_ep::cuda {
namespace {

constexpr int kPut = 4;      // vectors a lane puts together
constexpr int kTargets = 8;  // partials a lane has in flight

struct LamportCombineParams {
  DeviceComm comm;
  CombineArgs args;
  int32_t words, vectors;   // of a row
  bool early;               // see DeviceLamport::run
  bool eager;               // partials are loaded before it is known whether the row holds a token
  bool in_words, out_words; // rows begin on 4 bytes
};

template <class T, bool MASK>
class LamportCombine {
  static constexpr int kElements = 4 * kLamportWords / static_cast<int>(sizeof(T));
  using Sum = RunningSum<T, kElements>;

 public:
  __device__ LamportCombine(const LamportCombineParams& p, LamportShared& shared)
      : p_(p),
        a_(p.args),
        c_(p.comm),
        transport_(p.comm, OpKind::kCombine, shared),
        lane_(static_cast<int32_t>(threadIdx.x) % 32) {}

  __device__ void run() {
    transport_.begin(a_.mask);
    const StepHeader header = step_header(a_);
    const int32_t put_chunks = divide(p_.vectors + 32 * kPut - 1, 32 * kPut), take_chunks = divide(p_.vectors + 31, 32);
    const int32_t puts = (c_.ep_size - 1) * a_.tokens_per_rank * put_chunks;
    transport_.run(
        header, p_.early,
        [&](int32_t warp, int32_t warps) {
          for (int32_t i = warp; i < puts; i += warps) {
            const int32_t pair = divide(i, put_chunks), nth = divide(pair, a_.tokens_per_rank);
            const int32_t next = c_.rank + 1 + nth;
            put_chunk(next < c_.ep_size ? next : next - c_.ep_size, pair - nth * a_.tokens_per_rank,
                      i - pair * put_chunks);
          }
        },
        [&](int32_t warp, int32_t warps) {
          const int32_t takes = a_.num_tokens * take_chunks;
          const int32_t shift = puts - divide(puts, warps) * warps;
          for (int32_t i = warp < shift ? warp - shift + warps : warp - shift; i < takes; i += warps) {
            const int32_t t = divide(i, take_chunks);
            take_chunk(t, 32 * (i - t * take_chunks) + lane_, header);
          }
        });
  }

 private:
  __device__ const char* partial_of(int32_t source, int32_t t) const {
    return a_.expert_output.data + (static_cast<int64_t>(source) * a_.tokens_per_rank + t) * a_.expert_output.stride;
  }
  // The words of a vector of a row of this rank; what lies beyond the row is 0.
  __device__ void load_words(const char* row, int32_t vector, uint32_t (&word)[kLamportWords]) const {
#pragma unroll
    for (int j = 0; j < kLamportWords; ++j) {
      const int32_t w = kLamportWords * vector + j;
      word[j] = 0;
      if (w >= p_.words) continue;
      if (p_.in_words) {
        word[j] = __ldg(reinterpret_cast<const uint32_t*>(row) + w);
      } else {
        for (int i = 0; i < 4; ++i) word[j] |= static_cast<uint32_t>(static_cast<uint8_t>(row[4ll * w + i])) << 8 * i;
      }
    }
  }

  __device__ void put_chunk(int32_t source, int32_t t, int32_t chunk) {
    const int32_t slot = a_.routing[static_cast<int64_t>(1 + source) * a_.tokens_per_rank + t];
    const char* row = partial_of(source, t);
    const int32_t first = 32 * kPut * chunk + lane_;
    if (!p_.eager && slot < 0) return;
    uint32_t word[kPut][kLamportWords];
#pragma unroll
    for (int i = 0; i < kPut; ++i) load_words(row, first + 32 * i, word[i]);
    if (slot < 0 || slot >= a_.max_targets || !transport_.is_peer(source)) return;
    LamportVector* to = transport_.window(source).lamport_partial(c_.offsets, c_.shape, transport_.round(), t, slot);
#pragma unroll
    for (int i = 0; i < kPut; ++i) {
      const int32_t v = first + 32 * i;
      if (v < p_.vectors) store_vector(to + v, word[i][0], word[i][1], word[i][2], transport_.tag());
    }
  }

  // The j-th target of own token t, or -1 where nothing is to be added.
  __device__ int32_t target_of(int32_t t, int32_t j) const {
    if (j >= a_.max_targets) return -1;
    const int32_t rank = a_.routing[static_cast<int64_t>(1 + c_.ep_size + j) * a_.tokens_per_rank + t];
    const bool counts = rank >= 0 && rank < c_.ep_size && transport_.is_active(rank) && transport_.is_active(c_.rank);
    return counts ? rank : -1;
  }

  __device__ void take_chunk(int32_t t, int32_t vector, const StepHeader& header) {
    const bool inside = vector < p_.vectors;
    const Window own = transport_.own();
    Sum sum;
    for (int32_t first = 0; first < a_.max_targets; first += kTargets) {
      int32_t target[kTargets];
      LamportVector value[kTargets];
      const LamportVector* from[kTargets];
      unsigned wanted = 0;
      int32_t peer = -1;
#pragma unroll
      for (int j = 0; j < kTargets; ++j) target[j] = target_of(t, first + j);
#pragma unroll
      for (int j = 0; j < kTargets; ++j) {
        value[j] = {{}, transport_.tag() - 1};
        from[j] = own.lamport_partial(c_.offsets, c_.shape, transport_.round(), t, first + j) + vector;
        if (target[j] < 0 || !inside) continue;
        if (target[j] == c_.rank) {
          load_words(partial_of(c_.rank, t), vector, value[j].word);
        } else {
          value[j] = load_vector(from[j]);
          wanted |= 1u << j;
          if (peer < 0) peer = target[j];
        }
      }
      // A wait that is given up leaves numbers that nobody may use: the step ends in an error.
      transport_.template await<kTargets>(peer, value, from, wanted, header);
#pragma unroll
      for (int j = 0; j < kTargets; ++j) {
        if (target[j] < 0) continue;
        const T* x = reinterpret_cast<const T*>(value[j].word);
        sum.add([&](int e) { return to_sum(x[e]); });
      }
    }
    if (!inside) return;
    uint32_t word[kLamportWords];
#pragma unroll
    for (int e = 0; e < kElements; ++e) reinterpret_cast<T*>(word)[e] = sum.rounded(e);
    char* row = a_.out + t * a_.out_stride;
#pragma unroll
    for (int j = 0; j < kLamportWords; ++j) {
      const int32_t w = kLamportWords * vector + j;
      if (w >= p_.words) continue;
      if (p_.out_words) {
        reinterpret_cast<uint32_t*>(row)[w] = word[j];
      } else {
        for (int i = 0; i < 4; ++i) row[4ll * w + i] = static_cast<char>(word[j] >> 8 * i);
      }
    }
  }

  const LamportCombineParams& p_;
  const CombineArgs& a_;
  const DeviceComm& c_;
  DeviceLamport<MASK> transport_;
  const int32_t lane_;
};

template <class T, bool MASK>
__global__ void __launch_bounds__(kThreads, 2) lamport_combine_kernel(const __grid_constant__ LamportCombineParams p) {
  __shared__ LamportShared shared;
  LamportCombine<T, MASK> combine(p, shared);
  wait_for_predecessor();
  combine.run();
}

template <class T>
const void* kernel_for(bool mask) {
  return mask ? reinterpret_cast<const void*>(lamport_combine_kernel<T, true>)
              : reinterpret_cast<const void*>(lamport_combine_kernel<T, false>);
}
const void* kernel_of(ElementType type, bool mask) {
  return type == ElementType::kBFloat16  ? kernel_for<__nv_bfloat16>(mask)
         : type == ElementType::kFloat16 ? kernel_for<__half>(mask)
                                         : kernel_for<float>(mask);
}

}  // namespace

std::vector<const void*> lamport_combine_kernels() {
  std::vector<const void*> all;
  for (const ElementType type : {ElementType::kBFloat16, ElementType::kFloat16, ElementType::kFloat32}) {
    for (const bool mask : {false, true}) all.push_back(kernel_of(type, mask));
  }
  return all;
}

bool takes_lamport(const Communicator& comm, const CombineArgs& args) {
  const WindowShape& shape = comm.shape();
  return in_reach(comm, args, shape.lamport_tokens) && shape.wire == CombineWire::kRows &&
         args.element_type != ElementType::kFloat64 && args.expert_output.bytes % 4 == 0;
}

void lamport_combine(Communicator& comm, const CombineArgs& args, void* stream) {
  DeviceEnd& end = *comm.device_end();
  LamportCombineParams p{end.comm(comm, args.timeout_sec), args};
  p.words = static_cast<int32_t>(args.expert_output.bytes / 4);
  p.vectors = static_cast<int32_t>(lamport_vectors(args.expert_output.bytes));
  // Each rank holds min(K, W) / W of the rows on average: with few of them, loading on suspicion costs more than it
  // saves.
  p.eager = comm.ep_size() <= 2 * args.max_targets;
  p.in_words = alignment_of({reinterpret_cast<int64_t>(args.expert_output.data), args.expert_output.stride}) >= 4;
  p.out_words = alignment_of({reinterpret_cast<int64_t>(args.out), args.out_stride}) >= 4;
  const int32_t put = (comm.ep_size() - 1) * args.tokens_per_rank * ((p.vectors + 32 * kPut - 1) / (32 * kPut));
  const int32_t take = args.num_tokens * ((p.vectors + 31) / 32);
  const int32_t blocks = std::min(end.max_blocks, 1 + (std::max({put, take, 1}) + kThreads / 32 - 1) / (kThreads / 32));
  p.early = blocks <= end.early_blocks;
  launch(kernel_of(args.element_type, comm.options().enable_rank_mask), blocks, kThreads, &p, end.pdl, stream,
         "combine");
}

}  // namespace moe_ep::cuda
