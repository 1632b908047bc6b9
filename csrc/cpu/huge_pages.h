// Fewer page faults on large outputs.
#pragma once

#include <sys/mman.h>

#include <cstdint>

namespace moe_ep::cpu {

// An op's outputs are fresh memory, and the kernel hands out fresh memory page by page: one fault per 4 KiB costs as
// much as copying the page. Asks for 2 MiB pages instead, where the system offers them on request.
//
// Only from 32 MiB on: there malloc maps and unmaps every block by itself (glibc's largest mmap threshold), so the
// request ends with the tensor and never sticks to memory that the process uses for something else.
inline void prefer_huge_pages(char* data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kHuge = uintptr_t{2} << 20;
  if (bytes < int64_t{32} << 20) return;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHuge - 1) / kHuge * kHuge;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) / kHuge * kHuge;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // a wish: refused, nothing is lost
#else
  (void)data, (void)bytes;
#endif
}

}  // namespace moe_ep::cpu
