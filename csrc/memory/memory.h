// Memory that one rank owns and its peers map. One small implementation per kind of handle, beside this file.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "csrc/ep.h"

namespace moe_ep {

class WindowMemory {
 public:
  virtual ~WindowMemory() = default;
  // "shm", "cuda_ipc", ...: what describe() and the logs call it.
  virtual const char* kind() const = 0;
  // An opaque string by which a peer's connect() maps this rank's bytes.
  virtual std::string handle() const = 0;
  // Maps the windows of all ranks; handles[rank] is this rank's own. Throws Error that names the rank and the cause.
  virtual void connect(int rank, const std::vector<std::string>& handles) = 0;
  // Called once every rank has connected: drops what was only needed for the exchange.
  virtual void seal() = 0;
  // Base addresses, in this process, of the windows of all ranks. Valid after connect().
  virtual const std::vector<char*>& bases() const = 0;
  // The logical endpoints of the windows of all ranks, as this process names them; empty where they have none. Valid
  // after connect(), which changes them.
  virtual std::vector<uint32_t> endpoints() const { return {}; }
  // Gives the physical memory back and keeps every address; resume() puts fresh zeros behind the own one, after which
  // connect() with new handles maps the peers where they were. Throws Error where the kind cannot.
  virtual void suspend() {
    throw Error(std::string(kind()) + " windows cannot keep their addresses over a checkpoint");
  }
  virtual void resume() { suspend(); }
};

// POSIX shared memory between processes of one host. Zero-filled, fully backed (a full /dev/shm fails here and not
// as SIGBUS later).
std::unique_ptr<WindowMemory> make_shm_memory(size_t bytes);

#ifdef MOE_EP_CUDA
// GPU memory, zero-filled: by fabric handle, by file descriptor, by cudaIpc handle.
std::unique_ptr<WindowMemory> make_vmm_memory(size_t bytes, int32_t device, bool fabric);
// By fabric handle, with a logical endpoint per window, for counted writes. Throws Error where this process has such a
// window already, or the driver makes no endpoint of this size.
std::unique_ptr<WindowMemory> make_endpoint_memory(size_t bytes, int32_t device, int32_t rank, int32_t ep_size);
std::unique_ptr<WindowMemory> make_ipc_memory(size_t bytes, int32_t device);
#endif

}  // namespace moe_ep
