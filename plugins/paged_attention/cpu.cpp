// Causal attention over the paged cache, with online softmax.
//
// An item is one KV head of one request for a block of queries; all query heads of the group and
// all its queries share each tile of keys. A tile is 32 keys at an absolute position (a multiple
// of 32), and tiles follow one another in order, so a query's result does not depend on the chunk
// or batch it came in: a tile without visible keys for a query changes nothing of it.
//
// Scores: lanes are keys, and one multiply-add per element of the head, even and odd elements in
// two chains. Output: lanes are elements, and one multiply-add per key in order.
#include "../cpu/rows.h"

namespace llmctl {
namespace LLMCTL_ISA {
namespace {

constexpr int kTileKeys = 32;
constexpr int kMaxRows = 32;  // (query, head) pairs of an item, unless one query has more heads
#if defined(__AVX512F__)
constexpr int kScoreRows = 4;  // rows that share loaded keys: 16 accumulators
constexpr int kOutputRows = 4;
#else
constexpr int kScoreRows = 1;
constexpr int kOutputRows = 1;
#endif
constexpr int64_t kSerialScores = 1 << 15;  // scores * head_size below this run on one thread

struct Shape {
  int64_t layer, num_heads, num_kv_heads, size;
  float softmax_scale;
  int64_t window;
  int64_t heads_per_group() const { return num_heads / num_kv_heads; }
  int64_t padded_size() const { return (size + kLanes - 1) / kLanes * kLanes; }
};

// One row: a query head at a position, and its running softmax.
struct Row {
  int64_t position;
  float top, total;
};

// 16 rows of 16 floats, transposed in place.
inline void transpose(V rows[kLanes]) {
#if defined(__AVX512F__)
  __m512 a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    const __m512 p = (__m512)rows[i].part[0], q = (__m512)rows[i + 1].part[0];
    a[i] = _mm512_unpacklo_ps(p, q);
    a[i + 1] = _mm512_unpackhi_ps(p, q);
  }
  for (int i = 0; i < 16; i += 4) {
    const __m512d p = _mm512_castps_pd(a[i]), q = _mm512_castps_pd(a[i + 2]);
    const __m512d r = _mm512_castps_pd(a[i + 1]), s = _mm512_castps_pd(a[i + 3]);
    b[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(p, q));
    b[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(p, q));
    b[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(r, s));
    b[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(r, s));
  }
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88);
    a[i + 4] = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd);
    a[i + 8] = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    rows[i].part[0] = (Floats)_mm512_shuffle_f32x4(a[i], a[i + 8], 0x88);
    rows[i + 8].part[0] = (Floats)_mm512_shuffle_f32x4(a[i], a[i + 8], 0xdd);
  }
#else
  float from[kLanes][kLanes], to[kLanes][kLanes];
  for (int i = 0; i < kLanes; ++i) store(from[i], rows[i]);
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < kLanes; ++j) to[j][i] = from[i][j];
  }
  for (int i = 0; i < kLanes; ++i) rows[i] = load(to[i]);
#endif
}

// The keys and values of one tile for one KV head, widened.
struct Tile {
  float* keys;    // [padded_size][kTileKeys]
  float* values;  // [kTileKeys][padded_size]

  template <class C>
  void read(const Step& step, const Shape& shape, const int32_t* blocks, int64_t kv_head,
            int64_t first, int64_t count) {
    using E = typename C::Element;
    const int64_t size = shape.size, padded = shape.padded_size();
    const int64_t per_block = step.tokens_per_block;
    const int64_t plane = shape.num_kv_heads * per_block * size;  // from K to V
    const E* rows[kTileKeys];
    for (int64_t j = 0; j < count; ++j) {
      const int64_t block = blocks[(first + j) / per_block], offset = (first + j) % per_block;
      const int64_t page = (shape.layer * step.num_blocks + block) * 2 * shape.num_kv_heads;
      rows[j] = static_cast<const E*>(step.kv_cache) +
                ((page + kv_head) * per_block + offset) * size;
    }
    for (int64_t j0 = 0; j0 < kTileKeys; j0 += kLanes) {
      for (int64_t d = 0; d < padded; d += kLanes) {
        V square[kLanes];
        for (int j = 0; j < kLanes; ++j) {
          square[j] = j0 + j < count ? load_some<C>(rows[j0 + j] + d, size - d) : set(0.0f);
        }
        transpose(square);
        for (int i = 0; i < kLanes; ++i) store(keys + (d + i) * kTileKeys + j0, square[i]);
      }
    }
    for (int64_t j = 0; j < kTileKeys; ++j) {
      for (int64_t d = 0; d < padded; d += kLanes) {
        const V value = j < count ? load_some<C>(rows[j] + plane + d, size - d) : set(0.0f);
        store(values + j * padded + d, value);
      }
    }
  }
};

// scores [ROWS][kTileKeys] of ROWS queries [padded] against a tile of keys.
template <int ROWS>
inline void score_rows(const float* queries, int64_t padded, const float* keys, int64_t size,
                       float scale, float* scores) {
  V even[ROWS][2], odd[ROWS][2];
  for (int r = 0; r < ROWS; ++r) even[r][0] = even[r][1] = odd[r][0] = odd[r][1] = set(0.0f);
  for (int64_t d = 0; d < size; d += 2) {
    const float* at = keys + d * kTileKeys;
    const V k00 = load(at), k01 = load(at + kLanes);
    const V k10 = load(at + kTileKeys), k11 = load(at + kTileKeys + kLanes);
    for (int r = 0; r < ROWS; ++r) {
      const V q0 = set(queries[r * padded + d]), q1 = set(queries[r * padded + d + 1]);
      even[r][0] = fma(q0, k00, even[r][0]);
      even[r][1] = fma(q0, k01, even[r][1]);
      odd[r][0] = fma(q1, k10, odd[r][0]);
      odd[r][1] = fma(q1, k11, odd[r][1]);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    store(scores + r * kTileKeys, (even[r][0] + odd[r][0]) * set(scale));
    store(scores + r * kTileKeys + kLanes, (even[r][1] + odd[r][1]) * set(scale));
  }
}

// Turns a row's scores into weights, keys [low, high) of the tile being visible. Returns the
// factor for what the row has accumulated.
inline float soften(Row& row, float* scores, int64_t low, int64_t high) {
  const V hidden = set(-__builtin_inff());
  const int begin = static_cast<int>(low), end = static_cast<int>(high);
  const V a = select_range(begin, end, load(scores), hidden);
  const V b = select_range(begin - kLanes, end - kLanes, load(scores + kLanes), hidden);
  const float most = largest(max(a, b));
  const float top = most > row.top ? most : row.top;
  const V shift = set(top);
  const V pa = exponential(a - shift), pb = exponential(b - shift);
  store(scores, pa);
  store(scores + kLanes, pb);
  float factor = 1.0f;  // e^0, exactly
  if (top != row.top) {
    float lanes[kLanes];
    store(lanes, exponential(set(row.top - top)));
    factor = lanes[0];
  }
  row.total = row.total * factor + sum(pa + pb);
  row.top = top;
  return factor;
}

// outputs [ROWS][padded] += weights [ROWS][kTileKeys] * values, over the first `count` keys.
template <int ROWS, int PARTS>
inline void add_values(const float* weights, const float* values, int64_t padded, int64_t count,
                       const float* factors, float* outputs) {
  V total[ROWS][PARTS];
  for (int r = 0; r < ROWS; ++r) {
    for (int p = 0; p < PARTS; ++p) {
      total[r][p] = load(outputs + r * padded + p * kLanes) * set(factors[r]);
    }
  }
  for (int64_t j = 0; j < count; ++j) {
    V value[PARTS];
    for (int p = 0; p < PARTS; ++p) value[p] = load(values + j * padded + p * kLanes);
    for (int r = 0; r < ROWS; ++r) {
      const V weight = set(weights[r * kTileKeys + j]);
      for (int p = 0; p < PARTS; ++p) total[r][p] = fma(weight, value[p], total[r][p]);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int p = 0; p < PARTS; ++p) store(outputs + r * padded + p * kLanes, total[r][p]);
  }
}

template <int ROWS>
inline void add_all_values(const float* weights, const float* values, int64_t padded,
                           int64_t count, const float* factors, float* outputs) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= padded; d += 4 * kLanes) {
    add_values<ROWS, 4>(weights, values + d, padded, count, factors, outputs + d);
  }
  for (; d < padded; d += kLanes) {
    add_values<ROWS, 1>(weights, values + d, padded, count, factors, outputs + d);
  }
}

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

// Softmax and output of rows that already have scores against the tile at `first`.
void absorb_tile(Workspace& w, const Shape& shape, int64_t num_rows, int64_t first,
                 int64_t count) {
  const int64_t padded = shape.padded_size();
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t position = w.rows[r].position;
    const int64_t high = smaller(count, position + 1 - first);
    const int64_t low = shape.window > 0 ? larger(0, position + 1 - shape.window - first) : 0;
    if (low >= high) {  // nothing visible: the row stays as it is
      w.factors[r] = 1.0f;
      std::memset(w.scores + r * kTileKeys, 0, kTileKeys * sizeof(float));
    } else {
      w.factors[r] = soften(w.rows[r], w.scores + r * kTileKeys, low, high);
    }
  }
  int64_t r = 0;
  for (; r + kOutputRows <= num_rows; r += kOutputRows) {
    add_all_values<kOutputRows>(w.scores + r * kTileKeys, w.tile.values, padded, count,
                                w.factors + r, w.outputs + r * padded);
  }
  for (; r < num_rows; ++r) {
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
  enum { kQ, kKScale, kVScale, kOutScale, kOut };

  Attention(const Op& op, const Step& step)
      : op(op), step(step), key_scale(1.0f), value_scale(1.0f) {
    shape = Shape{op.integers[0], op.integers[1], op.integers[2],
                  op.integers[3], static_cast<float>(op.reals[4]), op.integers[5]};
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

    const int64_t oldest = w.rows[0].position, newest = w.rows[num_rows - 1].position;
    const int64_t begin = shape.window > 0 ? larger(0, oldest + 1 - shape.window) : 0;
    const int32_t* blocks = step.block_tables + request * step.max_blocks;
    const float scale = shape.softmax_scale * key_scale;
    for (int64_t first = begin / kTileKeys * kTileKeys; first <= newest; first += kTileKeys) {
      const int64_t count = smaller(kTileKeys, newest + 1 - first);
      with_type(step.kv_dtype, [&](auto type) {
        w.tile.read<decltype(type)>(step, shape, blocks, kv_head, first, count);
      });
      int64_t r = 0;
      for (; r + kScoreRows <= num_rows; r += kScoreRows) {
        score_rows<kScoreRows>(w.queries + r * padded, padded, w.tile.keys, size, scale,
                               w.scores + r * kTileKeys);
      }
      for (; r < num_rows; ++r) {
        score_rows<1>(w.queries + r * padded, padded, w.tile.keys, size, scale,
                      w.scores + r * kTileKeys);
      }
      absorb_tile(w, shape, num_rows, first, count);
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
  // A group wider than a block of rows is cut; otherwise several queries share the block.
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
