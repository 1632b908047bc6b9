// The ops as PyTorch hears them: one row per op. Each column file (meta.cpp, cpu.cpp, cuda.cpp) fills every row;
// tests/test_house.py walks the table.
//
// `order` is a 1-element tensor per communicator that no kernel touches. Declaring it mutated keeps the ops of a
// communicator in program order and alive in a graph, while all other compute may move between them.
#include <ATen/core/enum_tag.h>
#include <torch/library.h>

// The real kernels take any strides; the tag makes Inductor pass the strides that eager code would.
TORCH_LIBRARY(moe_ep, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides};
  m.def(
      "dispatch(Tensor hidden_states, Tensor topk_ids, Tensor? topk_weights, Tensor? hidden_states_scale,"
      " Tensor(a!) order, *, SymInt tokens_per_rank, int num_experts, int ep_size, int invalid_expert_id=-1,"
      " Tensor? eplb_local_stats=None, Tensor? active_rank_mask=None, int timeout_sec=300, str comm)"
      " -> (Tensor hidden_states, Tensor topk_ids, Tensor topk_weights, Tensor hidden_states_scale,"
      " Tensor eplb_gathered_stats, Tensor routing)",
      tags);
  // A step as two ops: the start sends, the wait takes, with the same arguments. They are the wait's inputs too, since
  // it takes the own rows from them; that also keeps them alive and unmodified in a graph. `pending` is opaque. `after`
  // is not read: a compiler, which may move what is computed between the two behind the wait, must compute it before.
  m.def(
      "dispatch_start(Tensor hidden_states, Tensor topk_ids, Tensor? topk_weights, Tensor? hidden_states_scale,"
      " Tensor(a!) order, *, SymInt tokens_per_rank, int num_experts, int ep_size, int invalid_expert_id=-1,"
      " Tensor? eplb_local_stats=None, Tensor? active_rank_mask=None, int timeout_sec=300, str comm)"
      " -> Tensor pending",
      tags);
  m.def(
      "dispatch_wait(Tensor hidden_states, Tensor topk_ids, Tensor? topk_weights, Tensor? hidden_states_scale,"
      " Tensor pending, Tensor? after, Tensor(a!) order, *, SymInt tokens_per_rank, int num_experts, int ep_size,"
      " int invalid_expert_id=-1, Tensor? eplb_local_stats=None, Tensor? active_rank_mask=None, int timeout_sec=300,"
      " str comm)"
      " -> (Tensor hidden_states, Tensor topk_ids, Tensor topk_weights, Tensor hidden_states_scale,"
      " Tensor eplb_gathered_stats, Tensor routing)",
      tags);
  m.def(
      "combine(Tensor expert_output, Tensor routing, Tensor(a!) order, *, SymInt num_tokens, int ep_size,"
      " Tensor? active_rank_mask=None, int timeout_sec=300, str comm) -> Tensor",
      tags);
  m.def(
      "combine_start(Tensor expert_output, Tensor routing, Tensor(a!) order, *, SymInt num_tokens, int ep_size,"
      " Tensor? active_rank_mask=None, int timeout_sec=300, str comm) -> Tensor pending",
      tags);
  m.def(
      "combine_wait(Tensor expert_output, Tensor routing, Tensor pending, Tensor? after, Tensor(a!) order, *,"
      " SymInt num_tokens, int ep_size, Tensor? active_rank_mask=None, int timeout_sec=300, str comm) -> Tensor",
      tags);
  m.def(
      "combine_out(Tensor expert_output, Tensor routing, Tensor(a!) order, *, SymInt num_tokens, int ep_size,"
      " Tensor? active_rank_mask=None, int timeout_sec=300, str comm, Tensor(b!) out) -> ()",
      tags);
}
