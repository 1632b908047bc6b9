// torch_moe_ep._C, the control plane: open a window, export its handle, connect peers, describe, close. It sees csrc
// and Python, never torch; the ops themselves need none of it (a C++ program calls csrc/communicator.h directly).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include "csrc/communicator.h"
#include "csrc/transport/host_wait.h"
#ifdef MOE_EP_CUDA
#include "csrc/cuda/launch.h"
#include "csrc/memory/logical_endpoint.h"
#endif

namespace py = pybind11;
using namespace moe_ep;

namespace {

DelayPoint delay_point(const std::string& name) {
  if (name == "before_put") return DelayPoint::kBeforePut;
  if (name == "before_flag") return DelayPoint::kBeforeFlag;
  if (name == "after_flags") return DelayPoint::kAfterFlags;
  if (name == "before_rows") return DelayPoint::kBeforeRows;
  throw ArgumentError("point: expected before_put, before_flag, after_flags or before_rows, got " + name);
}

CombineWire combine_wire(const std::string& name) {
  if (name == "rows") return CombineWire::kRows;
  if (name == "fp8") return CombineWire::kFp8;
  if (name == "fp8_plain") return CombineWire::kFp8Plain;
  throw ArgumentError("wire: expected rows, fp8 or fp8_plain, got " + name);
}

CountedPuts counted_puts(const std::string& name) {
  if (name.empty()) return CountedPuts::kNone;
  if (name == "fabric") return CountedPuts::kFabric;
  if (name == "emulated") return CountedPuts::kEmulated;
  throw ArgumentError("counted: expected fabric, emulated or nothing, got " + name);
}
const char* counted_name(CountedPuts puts) {
  return puts == CountedPuts::kNone ? "" : puts == CountedPuts::kFabric ? "fabric" : "emulated";
}

RankMask mask_of(const std::vector<int>& ranks, int32_t ep_size) {
  RankMask mask;
  mask.given = true;
  for (const int rank : ranks) {
    if (rank < 0 || rank >= ep_size) {
      throw ArgumentError("active_ranks: expected ranks in 0.." + std::to_string(ep_size - 1) + ", got " +
                          std::to_string(rank));
    }
    mask.words[rank / 64] |= uint64_t{1} << (rank % 64);
  }
  return mask;
}

py::dict describe(const std::string& name) {
  const auto comm = find(name);
  const WindowShape& s = comm->shape();
  const Window::Offsets& o = comm->offsets();
  py::dict d;
  d["name"] = name;
  d["rank"] = comm->rank();
  d["ep_size"] = s.ep_size;
  d["device"] = comm->options().device == DeviceKind::kCpu ? "cpu" : "cuda";
  d["memory"] = comm->memory().kind();
  d["max_tokens_per_rank"] = s.max_tokens;
  d["max_top_k"] = s.max_top_k;
  d["dispatch_row_bytes"] = s.dispatch_row_bytes;
  d["combine_row_bytes"] = s.combine_row_bytes;
  d["wire"] = s.wire == CombineWire::kRows ? "rows" : s.wire == CombineWire::kFp8 ? "fp8" : "fp8_plain";
  d["window_bytes"] = o.bytes;
  d["stage_bytes"] = o.landing - o.stage;
  d["landing_bytes"] = o.lamport_headers - o.landing;
  d["lamport_bytes"] = o.totals - o.lamport_headers;
  d["lamport_max_tokens"] = s.lamport_tokens;
  d["counted"] = counted_name(comm->options().counted);
  d["counted_bytes"] = o.bytes - o.totals;
  d["counted_max_tokens_for_dispatch"] = s.counted_tokens;
  d["counted_max_tokens_for_combine"] = s.counted_combine_tokens;
  d["routing_bytes"] = o.stage;
  d["rounds"] = comm->rounds();
  d["last_error"] = comm->failure();
  return d;
}

}  // namespace

// Ctrl-C: ends the op with an error and stays pending, so that KeyboardInterrupt follows as soon as Python code runs.
// Other threads than the main one never get it, and must not ask for the GIL while the interpreter ends.
bool keyboard_interrupt() {
  if (gettid() != getpid()) return false;
  const py::gil_scoped_acquire gil;
  if (!PyOS_InterruptOccurred()) return false;
  PyErr_SetInterrupt();
  return true;
}

PYBIND11_MODULE(_C, m) {
  interrupt_check() = keyboard_interrupt;
  m.attr("MAX_TOP_K") = kMaxTopK;
  m.attr("MAX_TOKENS") = kMaxTokens;
  m.attr("MAX_RANKS") = kMaxRanks;
#ifdef MOE_EP_CUDA
  m.attr("has_cuda") = true;
  m.attr("MAX_BLOCKS") = cuda::kMaxBlocks;
  m.def(
      "resident_blocks",
      [](int32_t device_index, const std::string& counted) {
        return cuda::resident_blocks(device_index, counted_puts(counted));
      },
      py::arg("device_index"), py::arg("counted") = "",
      "Thread blocks of the kernels that the device holds at once, with those of counted writes. Loads the kernels.");
  m.def(
      "force_plan",
      [](const std::string& name, int32_t groups, int32_t pieces, int32_t threads, bool descending) {
        find(name)->device_end()->forced = {groups, pieces, groups > 0 ? 1 : 0, threads, descending};
      },
      py::arg("name"), py::arg("groups"), py::arg("pieces"), py::arg("threads"), py::arg("descending") = true,
      "Benchmarks only: cuts every step into groups * pieces blocks; groups = 0 returns to the own choice.");
  m.def(
      "counted_probe",
      [](int32_t device_index) {
        const bool compiled = cuda::compiled_with_counted_writes();
        const endpoint::Driver driver = compiled ? endpoint::installed_driver() : endpoint::Driver{};
        const endpoint::Probe found = endpoint::probe(driver, device_index, compiled);
        py::dict d;
        d["reason"] = found.reason;
        d["clique"] = found.clique;
        d["owner_access"] = found.owner_access;
        return d;
      },
      py::arg("device_index"),
      "Counted writes of the device: reason (str, why it has none, \"\" where it has them), clique (int, of devices "
      "that reach each other) and owner_access (bool, needed where ranks share a device).");
#else
  m.attr("has_cuda") = false;
#endif
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const ArgumentError& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const Error& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
    }
  });
  m.def(
      "open",
      [](const std::string& name, int32_t rank, int32_t ep_size, const std::string& device, int32_t device_index,
         const std::string& memory, bool enable_rank_mask, bool pdl, int32_t max_tokens, int32_t max_top_k,
         int32_t eplb_experts, int32_t weight_itemsize, int64_t dispatch_row_bytes, int64_t combine_row_bytes,
         const std::string& wire, int32_t lamport_max_tokens, const std::string& counted,
         int32_t counted_max_tokens_for_dispatch, int32_t counted_max_tokens_for_combine) {
        CommunicatorOptions options;
        options.name = name;
        options.rank = rank;
        options.device = device == "cuda" ? DeviceKind::kCuda : DeviceKind::kCpu;
        options.device_index = device_index;
        options.memory = memory;
        options.enable_rank_mask = enable_rank_mask;
        options.pdl = pdl;
        WindowShape& shape = options.shape;
        shape.ep_size = ep_size;
        shape.max_tokens = max_tokens;
        shape.max_top_k = max_top_k;
        shape.eplb_experts = eplb_experts;
        shape.weight_itemsize = weight_itemsize;
        shape.dispatch_row_bytes = dispatch_row_bytes;
        shape.combine_row_bytes = combine_row_bytes;
        shape.wire = combine_wire(wire);
        shape.lamport_tokens = lamport_max_tokens;
        options.counted = counted_puts(counted);
        shape.counted_tokens = counted_max_tokens_for_dispatch;
        shape.counted_combine_tokens = counted_max_tokens_for_combine;
        return py::bytes(moe_ep::open(options)->memory().handle());
      },
      py::kw_only(), py::arg("name"), py::arg("rank"), py::arg("ep_size"), py::arg("device"), py::arg("device_index"),
      py::arg("memory") = "shm", py::arg("enable_rank_mask"), py::arg("pdl") = false, py::arg("max_tokens"),
      py::arg("max_top_k"), py::arg("eplb_experts"), py::arg("weight_itemsize"), py::arg("dispatch_row_bytes"),
      py::arg("combine_row_bytes"), py::arg("wire") = "rows", py::arg("lamport_max_tokens") = 0,
      py::arg("counted") = "", py::arg("counted_max_tokens_for_dispatch") = 0,
      py::arg("counted_max_tokens_for_combine") = 0,
      "Allocates this rank's window under `name`; returns the handle its peers connect to.");
  m.def("fp8_row_bytes", &fp8_row_bytes, py::arg("hidden_size"), "Bytes of a partial that travels as FP8.");
  m.def(
      "connect",
      [](const std::string& name, const std::vector<std::string>& handles, int32_t max_blocks, int32_t early_blocks) {
        find(name)->connect(handles, max_blocks, early_blocks);
      },
      py::arg("name"), py::arg("handles"), py::arg("max_blocks") = 1, py::arg("early_blocks") = 0,
      "Maps the windows of all ranks (handles by rank); a GPU's kernels use at most max_blocks thread blocks, and "
      "those of at most early_blocks let the next kernel's blocks be launched before the round is complete.");
  m.def(
      "suspend", [](const std::string& name) { find(name)->suspend(); },
      "Gives the window's physical memory back and keeps all addresses.");
  m.def(
      "resume", [](const std::string& name) { return py::bytes(find(name)->resume()); },
      "Puts fresh memory behind the window's address; returns the new handle for connect().");
  m.def(
      "seal", [](const std::string& name) { find(name)->memory().seal(); },
      "Call once every rank has connected: nothing is left behind if a process dies later.");
  m.def("close", &moe_ep::close, "Unmaps and frees; idempotent.");
  m.def("names", &moe_ep::names, "Names of the open communicators.");
  m.def("describe", &describe, "Sizes and state of a communicator.");
  m.def(
      "set_active_ranks",
      [](const std::string& name, const std::vector<int>& ranks) {
        const auto comm = find(name);
        comm->set_active_ranks(mask_of(ranks, comm->ep_size()));
      },
      "The ranks that take part in steps whose call passes no active_rank_mask.");
  m.def(
      "set_delay",
      [](const std::string& name, const std::string& point, int64_t usec) {
        find(name)->delay_usec[static_cast<int>(delay_point(point))] = usec;
      },
      "Tests only: holds this rank up at a point of every round, in microseconds.");
}
