// What the kinds of GPU memory share: the handle a rank sends to its peers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <string>

#include "csrc/ep.h"

namespace moe_ep::cuda_memory {

inline void check_runtime(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  throw Error(std::string(what) + " failed: " + cudaGetErrorString(status));
}

// Makes a device current for the life of the object.
class OnDevice {
 public:
  explicit OnDevice(int32_t index) {
    check_runtime(cudaGetDevice(&before_), "cudaGetDevice");
    check_runtime(cudaSetDevice(index), "cudaSetDevice");
  }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

// Process ids repeat between containers; this does not.
inline uint64_t this_process() {
  static const uint64_t token = static_cast<uint64_t>(std::random_device{}()) << 32 | std::random_device{}();
  return token;
}

struct PeerHandle {
  uint64_t process;
  char* address;
  uint64_t bytes;
  int32_t device;
  int32_t text_length;
  char payload[128];

  PeerHandle() = default;
  PeerHandle(char* at, uint64_t size, int32_t on)
      : process(this_process()), address(at), bytes(size), device(on), text_length(0), payload{} {}

  bool in_this_process() const { return process == this_process(); }
  void set_text(const std::string& text) { text_length = static_cast<int32_t>(text.copy(payload, sizeof payload)); }
  std::string text() const { return std::string(payload, static_cast<size_t>(text_length)); }

  std::string packed() const { return std::string(reinterpret_cast<const char*>(this), sizeof *this); }
  static PeerHandle unpack(const std::string& packed, uint64_t expected_bytes, int peer) {
    PeerHandle h;
    if (packed.size() != sizeof h) throw Error("the window handle of rank " + std::to_string(peer) + " is none");
    std::memcpy(&h, packed.data(), sizeof h);
    if (h.bytes != expected_bytes) {
      throw Error("the window of rank " + std::to_string(peer) + " has " + std::to_string(h.bytes) +
                  " bytes, this rank's has " + std::to_string(expected_bytes));
    }
    return h;
  }
};

}  // namespace moe_ep::cuda_memory
