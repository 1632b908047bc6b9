// csrc/memory/logical_endpoint.h as functions of C, over a driver that is loaded from a file.
#include <dlfcn.h>

#include <cstring>
#include <exception>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "csrc/memory/logical_endpoint.h"

using namespace moe_ep;
using endpoint::Endpoints;

namespace {

endpoint::Driver driver;
std::string text;                      // of the last error, or the last string returned
std::unique_ptr<Endpoints> until_exit;

// 0, or 1 for an Error and 2 for an ArgumentError, whose sentence is harness_text() then.
template <class Function>
int guarded(const Function& function) {
  try {
    function();
    return 0;
  } catch (const ArgumentError& error) {
    text = error.what();
    return 2;
  } catch (const Error& error) {
    text = error.what();
    return 1;
  }
}

}  // namespace

extern "C" {

const char* harness_text() { return text.c_str(); }

// hidden: names, separated by spaces, that the driver shall seem not to export. Returns the first missing one, or "".
const char* harness_load(const char* path, const char* hidden) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return "the library itself";
  driver = endpoint::Driver::load([&](const char* name) -> void* {
    std::istringstream names(hidden);
    for (std::string word; names >> word;) {
      if (word == name) return nullptr;
    }
    return dlsym(library, name);
  });
  const char* name = driver.missing();
  return name == nullptr ? "" : name;
}

// Returns the reason.
const char* harness_probe(int32_t device, bool compiled, uint32_t* clique, bool* owner_access) {
  const endpoint::Probe found = endpoint::probe(driver, device, compiled);
  *clique = found.clique;
  *owner_access = found.owner_access;
  text = found.reason;
  return text.c_str();
}

int harness_bytes(int32_t device, int64_t window_bytes, int64_t* bytes) {
  return guarded([&] { *bytes = endpoint::endpoint_bytes(driver, device, window_bytes); });
}

int harness_open(int32_t device, int32_t rank, int32_t ep_size, int64_t window_bytes, int64_t physical_bytes,
                 uint64_t physical, int32_t timeout_ms, bool share_process, Endpoints** made) {
  return guarded([&] {
    endpoint::EndpointsOptions options;
    options.device_index = device;
    options.rank = rank;
    options.ep_size = ep_size;
    options.window_bytes = window_bytes;
    options.physical_bytes = physical_bytes;
    options.ready_timeout = std::chrono::milliseconds(timeout_ms);
    options.share_process = share_process;
    *made = std::make_unique<Endpoints>(driver, options, physical).release();
  });
}

int harness_handle(const Endpoints* endpoints, char* out, int64_t* bytes) {
  return guarded([&] {
    const std::string handle = endpoints->handle();
    std::memcpy(out, handle.data(), handle.size());
    *bytes = static_cast<int64_t>(handle.size());
  });
}

// sizes: of the handles, which lie one after the other.
int harness_connect(Endpoints* endpoints, const char* handles, const int64_t* sizes, int32_t count) {
  return guarded([&] {
    std::vector<std::string> all;
    for (int32_t i = 0; i < count; ++i) {
      all.emplace_back(handles, static_cast<size_t>(sizes[i]));
      handles += sizes[i];
    }
    endpoints->connect(all);
  });
}

int harness_ids(const Endpoints* endpoints, uint32_t* out) {
  return guarded([&] {
    const std::vector<uint32_t> ids = endpoints->ids();
    std::copy(ids.begin(), ids.end(), out);
  });
}

int harness_suspend(Endpoints* endpoints) {
  return guarded([&] { endpoints->suspend(); });
}
int harness_resume(Endpoints* endpoints, uint64_t physical) {
  return guarded([&] { endpoints->resume(physical); });
}
void harness_close(Endpoints* endpoints) { delete endpoints; }
// Closed by a static destructor.
void harness_keep(Endpoints* endpoints) { until_exit.reset(endpoints); }

const char* harness_occupied() {
  text = Endpoints::occupied();
  return text.c_str();
}

}  // extern "C"
