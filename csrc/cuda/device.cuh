// What every kernel of this room is written with: memory operations with a scope, programmatic dependent launch, and
// copies of many short rows that keep several loads of a thread in flight.
#pragma once

#include <cstdint>

#include "csrc/transport/lamport.h"

namespace moe_ep::cuda {

// What one thread moves at a time: the widest unit that divides every address of a step.
template <int BYTES>
struct Unit;
template <>
struct Unit<16> {
  uint4 v;
};
template <>
struct Unit<8> {
  uint2 v;
};
template <>
struct Unit<4> {
  uint32_t v;
};
template <>
struct Unit<2> {
  uint16_t v;
};
template <>
struct Unit<1> {
  uint8_t v;
};

// Plain (weak) loads that leave no line in L1: rows are read once, and a line kept from an earlier round is of no use.
__device__ __forceinline__ Unit<16> load(const Unit<16>* p) {
  Unit<16> x;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.v.x), "=r"(x.v.y), "=r"(x.v.z), "=r"(x.v.w)
               : "l"(p)
               : "memory");
  return x;
}
__device__ __forceinline__ Unit<8> load(const Unit<8>* p) {
  Unit<8> x;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(x.v.x), "=r"(x.v.y) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ Unit<2> load(const Unit<2>* p) {
  Unit<2> x;
  asm volatile("ld.global.L1::no_allocate.u16 %0, [%1];" : "=h"(x.v) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ Unit<4> load(const Unit<4>* p) {
  Unit<4> x;
  asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(x.v) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ Unit<1> load(const Unit<1>* p) {
  uint32_t x;
  asm volatile("ld.global.L1::no_allocate.u8 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return {static_cast<uint8_t>(x)};
}

inline __device__ __noinline__ uint4 load_bytes(const char* from, int64_t left) {
  uint32_t w[4] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (i < left) w[i / 4] |= static_cast<uint32_t>(static_cast<uint8_t>(from[i])) << 8 * (i % 4);
  }
  return {w[0], w[1], w[2], w[3]};
}
inline __device__ __noinline__ void store_bytes(char* to, uint4 unit, int64_t left) {
  const uint32_t w[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (i < left) to[i] = static_cast<char>(w[i / 4] >> 8 * (i % 4));
  }
}
// Up to 16 bytes from any address; whole units where the row begins on one.
__device__ __forceinline__ uint4 load_unit(const char* from, int64_t left, bool aligned) {
  if (aligned && left >= 16) return load(reinterpret_cast<const Unit<16>*>(from)).v;
  return load_bytes(from, left);
}
__device__ __forceinline__ void store_unit(char* to, uint4 unit, int64_t left, bool aligned) {
  if (aligned && left >= 16) {
    *reinterpret_cast<uint4*>(to) = unit;
    return;
  }
  store_bytes(to, unit, left);
}

__device__ __forceinline__ uint64_t load_acquire_sys(const uint64_t* p) {
  uint64_t x;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ void store_relaxed_sys(uint64_t* p, uint64_t x) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(x) : "memory");
}
__device__ __forceinline__ void add_relaxed_sys(uint64_t* p, uint64_t x) {
  asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(p), "l"(x) : "memory");
}
__device__ __forceinline__ void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// One 128-bit access each: a vector is seen whole or not at all.
__device__ __forceinline__ LamportVector load_vector(const LamportVector* p) {
  uint64_t low, high;
  asm volatile("{\n .reg .b128 x;\n ld.relaxed.sys.global.b128 x, [%2];\n mov.b128 {%0, %1}, x;\n}"
               : "=l"(low), "=l"(high)
               : "l"(p)
               : "memory");
  return {{static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high)},
          static_cast<uint32_t>(high >> 32)};
}
__device__ __forceinline__ void store_vector(LamportVector* p, uint32_t a, uint32_t b, uint32_t c, uint32_t tag) {
  const uint64_t low = static_cast<uint64_t>(b) << 32 | a, high = static_cast<uint64_t>(tag) << 32 | c;
  asm volatile("{\n .reg .b128 x;\n mov.b128 x, {%1, %2};\n st.relaxed.sys.global.b128 [%0], x;\n}" ::"l"(p), "l"(low),
               "l"(high)
               : "memory");
}

// 16 bytes from global to shared memory while the thread goes on; await_async_copies() before they are read.
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
      "l"(global)
      : "memory");
}
__device__ __forceinline__ void await_async_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Waits until the kernels before this one have ended and what they wrote is visible. Costs nothing where the kernel
// was launched without the attribute.
__device__ __forceinline__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Lets the next kernel's blocks be launched; that kernel still waits for this one's end before it reads.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// n / d for n >= 0, d >= 1, in a few instructions where n < 2^21: (n + 1/2) / d lies at least 1 / 2d from every
// integer, and the two roundings move it by less than (n + 1/2) / d * 1.5 * 2^-23.
__device__ __forceinline__ int32_t divide(int32_t n, int32_t d) {
  if (n >= 1 << 21) return n / d;
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(static_cast<float>(d)));
  return static_cast<int32_t>((static_cast<float>(n) + 0.5f) * reciprocal);
}

// Threads of a block walk `rows` rows of `units` units side by side: thread i takes units i, i + blockDim.x, ... of
// all rows laid end to end. Advancing needs no division.
struct RowWalk {
  int32_t row, unit;
  const int32_t units, row_step, unit_step;

  __device__ explicit RowWalk(int32_t units_of_row)
      : units(units_of_row),
        row_step(divide(static_cast<int32_t>(blockDim.x), units_of_row)),
        unit_step(static_cast<int32_t>(blockDim.x) - row_step * units_of_row) {
    row = divide(static_cast<int32_t>(threadIdx.x), units);
    unit = static_cast<int32_t>(threadIdx.x) - row * units;
  }
  __device__ void advance() {
    row += row_step;
    unit += unit_step;
    if (unit >= units) {
      unit -= units;
      ++row;
    }
  }
};

// Copies rows src_of(r) -> dst_of(r), r < rows, of `units` units. `before_store` runs once per thread after the first
// loads are on their way and before anything is stored (it may hold a barrier: every thread of the block calls it).
template <int BYTES, int UNROLL, class Src, class Dst, class Before>
__device__ __forceinline__ void copy_rows(int32_t rows, int32_t units, const Src& src_of, const Dst& dst_of,
                                          const Before& before_store) {
  using U = Unit<BYTES>;
  RowWalk walk(units > 0 ? units : 1);
  if (units <= 0) rows = 0;
  bool first = true;
  do {
    const U* from[UNROLL];  // all addresses before the first load, so that the loads leave back to back
    U* to[UNROLL];
    U value[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      from[i] = nullptr;
      if (walk.row < rows) {
        from[i] = reinterpret_cast<const U*>(src_of(walk.row)) + walk.unit;
        to[i] = reinterpret_cast<U*>(dst_of(walk.row)) + walk.unit;
      }
      walk.advance();
    }
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      if (from[i] != nullptr) value[i] = load(from[i]);
    }
    if (first) before_store();
    first = false;
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      if (from[i] != nullptr) *to[i] = value[i];
    }
  } while (walk.row < rows);
}

}  // namespace moe_ep::cuda
