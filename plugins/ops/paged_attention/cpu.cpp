// Causal attention over the paged cache, with online softmax.
//
// An item is one KV head of one request for a block of queries; all query heads of the group and
// all its queries share each tile of keys. A tile is 32 keys at an absolute position (a multiple
// of 32), and tiles follow one another in order, so a query's result does not depend on the chunk
// or batch it came in: a tile without visible keys for a query leaves it unchanged. In a tree of
// tokens, tiles that extend past the root are read for each token separately, along its path: the
// same keys at the same places of a tile as when that path is decoded token by token.
//
// Scores: lanes are keys, and one multiply-add per element of the head, even and odd elements in
// two chains. Output: lanes are elements, and one multiply-add per key in order.
#include "softmax.h"

namespace llmctl {
namespace LLMCTL_ISA {
namespace {

constexpr int64_t kSerialScores = 1 << 15;  // scores * head_size below this run on one thread

int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// The buffers of one item, carved from a thread's scratch.
struct Workspace {
  Row rows[kMaxRows];
  float factors[kMaxRows];
  float scores[kMaxRows * kTileKeys];
  float *queries, *outputs;  // [kMaxRows][padded]
  Tile tile;

  Workspace(void* scratch, int64_t padded) {
    queries = static_cast<float*>(scratch);
    outputs = queries + kMaxRows * padded;
    tile.keys = outputs + kMaxRows * padded;
    tile.values = tile.keys + kTileKeys * padded;
  }
};
static_assert((2 * kMaxRows + 2 * kTileKeys) * kMaxHeadSize * 4 <= (int64_t)kScratchBytes, "fits");

// Softmax and output of rows [begin, end) that already have scores against the tile at `first`.
void absorb_tile(Workspace& w, const Shape& shape, int64_t begin, int64_t end, int64_t first,
                 int64_t count) {
  const int64_t padded = shape.padded_size();
  for (int64_t r = begin; r < end; ++r) {
    const int64_t position = w.rows[r].position;
    int64_t high = smaller(count, position + 1 - first);
    int64_t low = larger(0, shape.oldest_seen(position) - first);
    const int64_t sinks = smaller(shape.sinks - first, high);
    if (sinks > 0) {  // also visible, with a gap between them and the window
      if (low >= high) high = low = sinks;
      for (int64_t j = sinks; j < low; ++j) w.scores[r * kTileKeys + j] = -__builtin_inff();
      low = 0;
    }
    if (low >= high) {  // nothing visible: the row stays as it is
      w.factors[r] = 1.0f;
      std::memset(w.scores + r * kTileKeys, 0, kTileKeys * sizeof(float));
    } else {
      w.factors[r] = soften(w.rows[r], w.scores + r * kTileKeys, low, high);
    }
  }
  int64_t r = begin;
  for (; r + kOutputRows <= end; r += kOutputRows) {
    add_all_values<kOutputRows>(w.scores + r * kTileKeys, w.tile.values, padded, count,
                                w.factors + r, w.outputs + r * padded);
  }
  for (; r < end; ++r) {
    add_all_values<1>(w.scores + r * kTileKeys, w.tile.values, padded, count, w.factors + r,
                      w.outputs + r * padded);
  }
}

// What one op call does, with its tensors unpacked.
struct Attention {
  const Op& op;
  const Step& step;
  Shape shape;
  float key_scale, value_scale;
  enum { kQ, kKScale, kVScale, kOutScale, kOut };  // the spec's roles in order

  Attention(const Op& op, const Step& step)
      : op(op), step(step), key_scale(1.0f), value_scale(1.0f) {
    shape = Shape{op.integers[0], op.integers[1], op.integers[2],
                  op.integers[3], static_cast<float>(op.reals[4]), op.integers[5],
                  op.integers[6]};
    LLMCTL_ASSERT(0 <= shape.layer && shape.layer < step.num_layers && shape.window >= 0);
    LLMCTL_ASSERT(shape.num_kv_heads == step.num_kv_heads && shape.size == step.head_size);
    LLMCTL_ASSERT(shape.num_heads % shape.num_kv_heads == 0 && shape.sinks >= 0);
    if (op.tensors[kKScale].data) key_scale = *static_cast<float*>(op.tensors[kKScale].data);
    if (op.tensors[kVScale].data) value_scale = *static_cast<float*>(op.tensors[kVScale].data);
  }

  // Queries [start, stop) of one request, heads [head, head + heads) of one KV head's group.
  void run_block(int64_t request, int64_t kv_head, int64_t head, int64_t heads, int64_t start,
                 int64_t stop, void* scratch) const {
    const int64_t size = shape.size, padded = shape.padded_size();
    Workspace w(scratch, padded);
    const int64_t num_rows = (stop - start) * heads;
    with_model_type(op.tensors[kQ].dtype, [&](auto type) {
      using T = decltype(type);
      const auto* q = static_cast<const typename T::Element*>(op.tensors[kQ].data);
      for (int64_t r = 0; r < num_rows; ++r) {
        const int64_t token = start + r / heads;
        const auto* from = q + (token * shape.num_heads + head + r % heads) * size;
        for (int64_t d = 0; d < padded; d += kLanes) {
          store(w.queries + r * padded + d, load_some<T>(from + d, size - d));
        }
        w.rows[r] = Row{step.position_ids[token], -__builtin_inff(), 0.0f};
      }
    });
    std::memset(w.outputs, 0, num_rows * padded * sizeof(float));

    const Path tree = tree_of(step, request);
    int64_t oldest = w.rows[0].position, newest = oldest;  // in a tree they are in any order
    for (int64_t r = heads; r < num_rows; r += heads) {
      oldest = smaller(oldest, w.rows[r].position);
      newest = larger(newest, w.rows[r].position);
    }
    const int64_t begin = shape.oldest_seen(oldest) / kTileKeys * kTileKeys;
    const int32_t* blocks = step.block_tables + request * step.max_blocks;
    // One tile for rows [from, to), whose keys are along `path`.
    const auto take = [&](const Path& path, int64_t from, int64_t to, int64_t first,
                          int64_t count) {
      const float scale = shape.softmax_scale * key_scale;
      const int64_t after = newest + 1 - first - kTileKeys;  // keys behind this tile
      const int64_t ahead = path.tokens ? 0 : larger(0, smaller(kTileKeys, after));
      with_cache_type(step.kv_dtype, [&](auto type) {
        w.tile.read<decltype(type)>(step, shape, blocks, kv_head, path, first, count, ahead);
      });
      int64_t r = from;
      for (; r + kScoreRows <= to; r += kScoreRows) {
        score_rows<kScoreRows>(w.queries + r * padded, padded, w.tile.keys, size, scale,
                               w.scores + r * kTileKeys);
      }
      for (; r < to; ++r) {
        score_rows<1>(w.queries + r * padded, padded, w.tile.keys, size, scale,
                      w.scores + r * kTileKeys);
      }
      absorb_tile(w, shape, from, to, first, count);
    };
    for (int64_t first = shape.sinks > 0 ? 0 : begin; first <= newest; first += kTileKeys) {
      if (first >= shape.sinks) first = larger(first, begin);  // from the sinks to the window
      const int64_t count = smaller(kTileKeys, newest + 1 - first);
      if (tree.tokens == nullptr || first + kTileKeys <= tree.root) {
        take(Path{}, 0, num_rows, first, count);
        continue;
      }
      for (int64_t r = 0; r < num_rows; r += heads) {
        const int64_t nth = start + r / heads - step.cu_q[request];
        const int64_t own = smaller(kTileKeys, w.rows[r].position + 1 - first);
        const Path path{tree.tokens + nth * step.path_width, tree.root};
        if (own > 0) take(path, r, r + heads, first, own);
      }
    }
    write_rows(w, num_rows, heads, head, start);
  }

  void write_rows(Workspace& w, int64_t num_rows, int64_t heads, int64_t head,
                  int64_t start) const {
    const int64_t size = shape.size, padded = shape.padded_size();
    const TensorRef &out_scale = op.tensors[kOutScale], &out = op.tensors[kOut];
    with_model_type(op.tensors[kQ].dtype, [&](auto type) {
      using T = decltype(type);
      for (int64_t r = 0; r < num_rows; ++r) {
        float* row = w.outputs + r * padded;
        const V total = set(w.rows[r].total), unit = set(value_scale);
        for (int64_t d = 0; d < padded; d += kLanes) {
          store(row + d, T::round(load(row + d) / total * unit));
        }
        const int64_t at = (start + r / heads) * shape.num_heads + head + r % heads;
        write_output(out, out_scale, TensorRef{}, at, row, size);
      }
    });
  }
};

}  // namespace

static void run_paged_attention(const Op& op, const Step& step, Context& context) {
  const Attention attention(op, step);
  const Shape& shape = attention.shape;
  const int64_t group = shape.heads_per_group();
  // A group wider than a block of rows is split; otherwise several queries share the block.
  const int64_t head_cuts = (group + kMaxRows - 1) / kMaxRows;
  const int64_t heads = (group + head_cuts - 1) / head_cuts;
  const int64_t queries = kMaxRows / heads;
  int64_t items = 0, scores = 0;
  for (int64_t request = 0; request < step.num_requests; ++request) {
    const int64_t count = step.cu_q[request + 1] - step.cu_q[request];
    items += (count + queries - 1) / queries;
    scores += count * step.kv_len[request];
  }
  const int64_t per_block = shape.num_kv_heads * head_cuts;
  auto item = [&](int64_t index, void* scratch) {
    // Later blocks of a chunk see more keys: they start first, so that threads end together.
    int64_t block = items - 1 - index / per_block, request = 0;
    for (;; ++request) {
      const int64_t count = step.cu_q[request + 1] - step.cu_q[request];
      const int64_t blocks = (count + queries - 1) / queries;
      if (block < blocks) break;
      block -= blocks;
    }
    const int64_t kv_head = index % per_block / head_cuts, cut = index % head_cuts;
    const int64_t start = step.cu_q[request] + block * queries;
    const int64_t stop = smaller(start + queries, step.cu_q[request + 1]);
    const int64_t head = kv_head * group + cut * heads;
    const int64_t count = smaller(heads, (kv_head + 1) * group - head);
    if (count > 0) attention.run_block(request, kv_head, head, count, start, stop, scratch);
  };
  const bool serial = scores * shape.num_heads * shape.size < kSerialScores;
  context.pool.each(items * per_block, serial, item);
}

}  // namespace LLMCTL_ISA
}  // namespace llmctl
