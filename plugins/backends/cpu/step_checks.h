// Whether a step's integers stay inside the tensors; a wrong one would read or write outside.
#pragma once

#include <cstdio>
#include <cstring>

#include "exports.h"

namespace llmctl {
namespace {

thread_local char g_message[256] = "";

template <class... Args>
int fail(Status status, const char* format, Args... args) {
  std::snprintf(g_message, sizeof(g_message), format, args...);
  return status;
}

// Every value of `values` must lie in [0, limit).
inline int check_range(const char* what, const int32_t* values, int64_t count, int64_t limit) {
  for (int64_t i = 0; i < count; ++i) {
    if (values[i] < 0 || values[i] >= limit) {
      return fail(kBadStep, "%s[%lld] is %d; it must be from 0 to %lld", what, (long long)i,
                  values[i], (long long)limit - 1);
    }
  }
  return kDone;
}

// Whether a path leads from the root, which an earlier step stored, over places of the request's
// own entries to one behind it.
inline bool is_stored_path(const Step& step, const int32_t* path, int64_t depth, int64_t places) {
  if (depth < 1 || depth >= step.path_width || depth >= places || path[0] != 0) return false;
  for (int64_t d = 1; d <= depth; ++d) {
    if (path[d] < 1 || path[d] >= places) return false;
  }
  return true;
}

// A request's tree: each token's path is its parent's path and the token, and as long as its
// position says. So no path leads out of the request's own tokens; nor does one whose beginning
// earlier steps computed, and which the step alone does not tell.
inline int check_tree(const Step& step, int64_t request) {
  const int64_t count = step.cu_q[request + 1] - step.cu_q[request];
  const Path tree = tree_of(step, request);
  if (step.tree_start[request] + count > step.num_paths || tree.root < 0 || count < 1 ||
      step.path_width < 1) {
    return fail(kBadStep, "request %lld has a tree of %lld tokens in row %d of %lld paths, and %d "
                "KV entries", (long long)request, (long long)count, step.tree_start[request],
                (long long)step.num_paths, step.kv_len[request]);
  }
  for (int64_t i = 0; i < count; ++i) {
    const int32_t* path = tree.tokens + i * step.path_width;
    const int64_t depth = step.position_ids[step.cu_q[request] + i] - tree.root;
    if (step.tree_roots != nullptr) {
      if (is_stored_path(step, path, depth, step.kv_len[request] - tree.root)) continue;
      return fail(kBadStep, "token %lld of request %lld's tree has a path that does not fit its "
                  "position %lld behind the root or the request's %d KV entries", (long long)i,
                  (long long)request, (long long)depth, step.kv_len[request]);
    }
    bool is_sound = depth >= 0 && depth < step.path_width && path[depth] == i && (depth > 0) == (i > 0);
    if (is_sound && depth > 0) {
      const int32_t parent = path[depth - 1];
      is_sound = parent >= 0 && parent < i &&
                 step.position_ids[step.cu_q[request] + parent] - tree.root == depth - 1 &&
                 std::memcmp(tree.tokens + parent * step.path_width, path, depth * 4) == 0;
    }
    if (!is_sound) {
      return fail(kBadStep, "token %lld of request %lld's tree has a path that does not fit its "
                  "position %lld behind the root", (long long)i, (long long)request,
                  (long long)depth);
    }
  }
  return kDone;
}

// The paged cache: slots, positions and block tables, for programs that use it.
inline int check_requests(const Step& step) {
  if (step.num_blocks < 1 || step.tokens_per_block < 1 || step.max_blocks < 0) {
    return fail(kBadStep, "the KV cache has %lld blocks of %d tokens, and tables of %d",
                (long long)step.num_blocks, step.tokens_per_block, step.max_blocks);
  }
  const int64_t slots = step.num_blocks * step.tokens_per_block;
  if (int bad = check_range("slot_mapping", step.slot_mapping, step.num_tokens, slots)) return bad;
  if (int bad = check_range("position_ids", step.position_ids, step.num_tokens, INT32_MAX)) {
    return bad;
  }
  const int64_t requests = step.num_requests;
  if (step.cu_q[0] != 0 || step.cu_q[requests] != step.num_tokens) {
    return fail(kBadStep, "cu_q runs from %d to %d; it must run from 0 to %d", step.cu_q[0],
                step.cu_q[requests], step.num_tokens);
  }
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t blocks =
        ((int64_t)step.kv_len[r] + step.tokens_per_block - 1) / step.tokens_per_block;
    if (step.cu_q[r + 1] < step.cu_q[r] || step.kv_len[r] < 0 || blocks > step.max_blocks) {
      return fail(kBadStep, "request %lld has tokens %d to %d and %d KV entries in %d blocks",
                  (long long)r, step.cu_q[r], step.cu_q[r + 1], step.kv_len[r], step.max_blocks);
    }
    if (int bad = check_range("block_tables", step.block_tables + r * step.max_blocks, blocks,
                              step.num_blocks)) {
      return bad;
    }
    if (step.tree_start != nullptr && step.tree_start[r] >= 0) {
      if (int bad = check_tree(step, r)) return bad;
      continue;
    }
    for (int64_t i = step.cu_q[r]; i < step.cu_q[r + 1]; ++i) {
      const bool is_ordered = i == step.cu_q[r] || step.position_ids[i] > step.position_ids[i - 1];
      if (!is_ordered || step.position_ids[i] >= step.kv_len[r]) {
        return fail(kBadStep, "position_ids[%lld] is %d; positions of a request must increase "
                    "and stay below its kv_len %d", (long long)i, step.position_ids[i],
                    step.kv_len[r]);
      }
    }
  }
  return kDone;
}

}  // namespace
}  // namespace llmctl
