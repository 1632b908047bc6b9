// torch_moe_ep._C, the control plane: open a window, export its handle, connect peers, describe, close. It sees csrc
// and Python, never torch; the ops themselves need none of it (a C++ program calls csrc/communicator.h directly).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "csrc/communicator.h"

namespace py = pybind11;
using namespace moe_ep;

namespace {

DelayPoint delay_point(const std::string& name) {
  if (name == "before_put") return DelayPoint::kBeforePut;
  if (name == "before_flag") return DelayPoint::kBeforeFlag;
  if (name == "after_flags") return DelayPoint::kAfterFlags;
  throw ArgumentError("point: expected before_put, before_flag or after_flags, got " + name);
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
  d["window_bytes"] = o.bytes;
  d["stage_bytes"] = o.landing - o.stage;
  d["landing_bytes"] = o.bytes - o.landing;
  d["routing_bytes"] = o.stage;
  d["rounds"] = comm->host().round;
  d["last_error"] = comm->host().failure;
  return d;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.attr("has_cuda") = false;
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
         bool enable_rank_mask, int32_t max_tokens, int32_t max_top_k, int32_t eplb_experts, int32_t weight_itemsize,
         int64_t dispatch_row_bytes, int64_t combine_row_bytes) {
        CommunicatorOptions options;
        options.name = name;
        options.rank = rank;
        options.device = device == "cuda" ? DeviceKind::kCuda : DeviceKind::kCpu;
        options.device_index = device_index;
        options.enable_rank_mask = enable_rank_mask;
        options.shape = {ep_size,         max_tokens,         max_top_k,        eplb_experts,
                         weight_itemsize, dispatch_row_bytes, combine_row_bytes};
        return py::bytes(moe_ep::open(options)->memory().handle());
      },
      py::kw_only(), py::arg("name"), py::arg("rank"), py::arg("ep_size"), py::arg("device"), py::arg("device_index"),
      py::arg("enable_rank_mask"), py::arg("max_tokens"), py::arg("max_top_k"), py::arg("eplb_experts"),
      py::arg("weight_itemsize"), py::arg("dispatch_row_bytes"), py::arg("combine_row_bytes"),
      "Allocates this rank's window under `name`; returns the handle its peers connect to.");
  m.def("connect", [](const std::string& name, const std::vector<std::string>& handles) { find(name)->connect(handles); },
        "Maps the windows of all ranks (handles by rank).");
  m.def("seal", [](const std::string& name) { find(name)->memory().seal(); },
        "Call once every rank has connected: nothing is left behind if a process dies later.");
  m.def("close", &moe_ep::close, "Unmaps and frees; idempotent.");
  m.def("names", &moe_ep::names, "Names of the open communicators.");
  m.def("describe", &describe, "Sizes and state of a communicator.");
  m.def("set_active_ranks",
        [](const std::string& name, const std::vector<int>& ranks) {
          const auto comm = find(name);
          comm->set_active_ranks(mask_of(ranks, comm->ep_size()));
        },
        "The ranks that take part in steps whose call passes no active_rank_mask.");
  m.def("set_delay",
        [](const std::string& name, const std::string& point, int64_t usec) {
          find(name)->delay_usec[static_cast<int>(delay_point(point))] = usec;
        },
        "Tests only: holds this rank up at a point of every round, in microseconds.");
}
