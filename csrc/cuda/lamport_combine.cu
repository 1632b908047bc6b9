// combine over the Lamport transport (csrc/transport/lamport.h): one kernel, a warp per piece of work.
//
// Put: (W - 1) * R * chunks pieces: 32 * put_vectors vectors of the partial of a received row, to the row's source, if
// this rank holds that row. Take: T * chunks pieces: 32 * VECTORS vectors of an own token, of all its targets;
// summed in the order of the targets (csrc/cuda/sum.cuh), its own partial straight from expert_output. A lane moves
// more vectors together where a warp would take one piece after another.
#include <algorithm>

#include "csrc/cuda/device.cuh"
#include "csrc/cuda/launch.cuh"
#include "csrc/cuda/launch.h"
#include "csrc/cuda/sum.cuh"
#include "csrc/limits.h"
#include "csrc/transport/lamport.cuh"

namespace moe_ep::cuda {
namespace {

constexpr int kInFlight = 8;  // vectors that a lane loads together

struct LamportCombineParams {
  DeviceComm comm;
  CombineArgs args;
  int32_t words, vectors;   // of a row
  int32_t put_vectors;      // that a lane puts together: half or all of kInFlight
  bool early;               // see DeviceLamport::run
  bool eager;               // partials are loaded before it is known whether the row holds a token
  bool in_words, out_words; // rows begin on 4 bytes
};

// VECTORS: of a token, that a lane takes together: 1, or 2 with half as many targets in flight.
template <class T, bool MASK, int VECTORS>
class LamportCombine {
  static constexpr int kTargets = kInFlight / VECTORS;
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
    const auto header = [&] { return step_header(a_); };
    const int32_t put_chunks = chunks_of(p_.put_vectors), puts = (c_.ep_size - 1) * a_.tokens_per_rank * put_chunks;
    transport_.run(
        header, p_.early,
        [&](int32_t warp, int32_t warps) {
          if (p_.put_vectors == kInFlight) {
            put_chunks_of<kInFlight>(warp, warps, puts, put_chunks);
          } else {
            put_chunks_of<kInFlight / 2>(warp, warps, puts, put_chunks);
          }
        },
        [&](int32_t warp, int32_t warps) {
          // Warps that had nothing to put, or less, take first.
          const int32_t shift = puts - divide(puts, warps) * warps;
          const int32_t begin = warp < shift ? warp - shift + warps : warp - shift;
          const int32_t chunks = chunks_of(VECTORS), takes = a_.num_tokens * chunks;
          for (int32_t i = begin; i < takes; i += warps) {
            const int32_t t = divide(i, chunks);
            take_chunk(t, 32 * VECTORS * (i - t * chunks) + lane_, header);
          }
        });
  }

 private:
  // Of a row, of that many vectors of each lane of a warp.
  __device__ int32_t chunks_of(int32_t vectors) const { return divide(p_.vectors + 32 * vectors - 1, 32 * vectors); }

  template <int COUNT>
  __device__ void put_chunks_of(int32_t begin, int32_t step, int32_t puts, int32_t chunks) {
    for (int32_t i = begin; i < puts; i += step) {
      const int32_t pair = divide(i, chunks), nth = divide(pair, a_.tokens_per_rank), next = c_.rank + 1 + nth;
      put_chunk<COUNT>(next < c_.ep_size ? next : next - c_.ep_size, pair - nth * a_.tokens_per_rank,
                       i - pair * chunks);
    }
  }

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

  template <int COUNT>
  __device__ void put_chunk(int32_t source, int32_t t, int32_t chunk) {
    const int32_t slot = a_.routing[static_cast<int64_t>(1 + source) * a_.tokens_per_rank + t];
    const char* row = partial_of(source, t);
    const int32_t first = 32 * COUNT * chunk + lane_;
    if (!p_.eager && __any_sync(0xFFFFFFFFu, slot < 0)) return;
    uint32_t word[COUNT][kLamportWords];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) load_words(row, first + 32 * i, word[i]);
    transport_.confirm();
    if (slot < 0 || slot >= a_.max_targets || !transport_.is_peer(source)) return;
    LamportVector* to = transport_.window(source).lamport_partial(c_.offsets, c_.shape, transport_.round(), t, slot);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int32_t v = first + 32 * i;
      if (v < p_.vectors) store_vector(to + v, word[i][0], word[i][1], word[i][2], transport_.tag());
    }
  }

  // The rank, or -1 where nothing of it is to be added.
  __device__ int32_t counted(int32_t rank) const {
    const bool counts = rank >= 0 && rank < c_.ep_size && transport_.is_active(rank) && transport_.is_active(c_.rank);
    return counts ? rank : -1;
  }
  // Vectors `first`, first + 32, ... of token t.
  template <class Header>
  __device__ void take_chunk(int32_t t, int32_t first, const Header& header) {
    const Window window = transport_.own();
    // Its own partial, whichever target that is.
    uint32_t mine[VECTORS][kLamportWords];
    const char* row = partial_of(c_.rank, t);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) load_words(row, first + 32 * v, mine[v]);
    Sum sum[VECTORS];
    for (int32_t begin = 0; begin < a_.max_targets; begin += kTargets) {
      int32_t target[kTargets];
      LamportVector value[kInFlight];
      unsigned wanted = 0;
      int32_t peer = -1;
      const auto from = [&](int i) {
        return window.lamport_partial(c_.offsets, c_.shape, transport_.round(), t, begin + i % kTargets) + first +
               32 * (i / kTargets);
      };
#pragma unroll
      for (int j = 0; j < kTargets; ++j) {
        target[j] = -1;
        if (begin + j >= a_.max_targets) continue;
        target[j] = a_.routing[static_cast<int64_t>(1 + c_.ep_size + begin + j) * a_.tokens_per_rank + t];
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        value[i] = {{}, transport_.tag() - 1};
        if (begin + i % kTargets < a_.max_targets && first + 32 * (i / kTargets) < p_.vectors) {
          if (p_.eager) value[i] = load_vector(from(i));
          wanted |= 1u << i;
        }
      }
#pragma unroll
      for (int j = 0; j < kTargets; ++j) {
        target[j] = counted(target[j]);
        const bool comes = target[j] >= 0 && target[j] != c_.rank;
        if (comes && peer < 0) peer = target[j];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
          if (!comes) wanted &= ~(1u << (v * kTargets + j));
        }
      }
      // A wait that is given up leaves numbers that nobody may use: the step ends in an error.
      transport_.template await<kInFlight>(peer, value, from, wanted, header);
#pragma unroll
      for (int j = 0; j < kTargets; ++j) {
        if (target[j] < 0) continue;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
          uint32_t word[kLamportWords];
#pragma unroll
          for (int w = 0; w < kLamportWords; ++w) {
            word[w] = target[j] == c_.rank ? mine[v][w] : value[v * kTargets + j].word[w];
          }
          sum[v].add([&](int e) { return to_sum(reinterpret_cast<const T*>(word)[e]); });
        }
      }
    }
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      if (first + 32 * v < p_.vectors) store_sum(t, first + 32 * v, sum[v]);
    }
  }

  __device__ void store_sum(int32_t t, int32_t vector, const Sum& sum) const {
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

template <class T, bool MASK, int VECTORS>
__global__ void __launch_bounds__(kThreads, 2) lamport_combine_kernel(const __grid_constant__ LamportCombineParams p) {
  __shared__ LamportShared shared;
  LamportCombine<T, MASK, VECTORS> combine(p, shared);
  wait_for_predecessor();
  combine.run();
}

template <class T, bool MASK>
const void* kernel_with(int32_t vectors) {
  return vectors == 1 ? reinterpret_cast<const void*>(lamport_combine_kernel<T, MASK, 1>)
                      : reinterpret_cast<const void*>(lamport_combine_kernel<T, MASK, 2>);
}
template <class T>
const void* kernel_for(bool mask, int32_t vectors) {
  return mask ? kernel_with<T, true>(vectors) : kernel_with<T, false>(vectors);
}
const void* kernel_of(ElementType type, bool mask, int32_t vectors) {
  return type == ElementType::kBFloat16  ? kernel_for<__nv_bfloat16>(mask, vectors)
         : type == ElementType::kFloat16 ? kernel_for<__half>(mask, vectors)
                                         : kernel_for<float>(mask, vectors);
}

}  // namespace

std::vector<const void*> lamport_combine_kernels() {
  std::vector<const void*> all;
  for (const ElementType type : {ElementType::kBFloat16, ElementType::kFloat16, ElementType::kFloat32}) {
    for (const bool mask : {false, true}) {
      for (const int32_t vectors : {1, 2}) all.push_back(kernel_of(type, mask, vectors));
    }
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
  const int32_t warps_of_block = kThreads / 32, warps = warps_of_block * (end.max_blocks - 1);
  const auto chunks_of = [&](int32_t vectors) { return (p.vectors + 32 * vectors - 1) / (32 * vectors); };
  const int32_t rows = (comm.ep_size() - 1) * args.tokens_per_rank;
  p.put_vectors = rows * chunks_of(kInFlight / 2) <= warps ? kInFlight / 2 : kInFlight;
  const int32_t vectors = args.num_tokens * chunks_of(1) <= warps || args.max_targets > kInFlight / 2 ? 1 : 2;
  const int32_t work = std::max({rows * chunks_of(p.put_vectors), args.num_tokens * chunks_of(vectors), 1});
  const int32_t blocks = std::min(end.max_blocks, 1 + (work + warps_of_block - 1) / warps_of_block);
  p.early = blocks <= end.early_blocks;
  launch(kernel_of(args.element_type, comm.options().enable_rank_mask, vectors), blocks, kThreads, &p, end.pdl, stream,
         "combine");
}

}  // namespace moe_ep::cuda
