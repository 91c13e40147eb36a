// A tile of cached keys and values, widened to float32 with the keys transposed.
#pragma once

#include "../../backends/cpu/rows.h"

namespace llmctl {
namespace LLMCTL_ISA {
namespace {

constexpr int kTileKeys = 32;
constexpr int kCacheLine = 64;  // bytes
constexpr int kMaxRows = 32;  // (query, head) pairs of an item, unless one query has more heads
#if defined(__AVX512F__)
constexpr int kScoreRows = 4;  // rows that share loaded keys: 16 accumulators
constexpr int kOutputRows = 4;
#else
constexpr int kScoreRows = 1;
constexpr int kOutputRows = 1;
#endif

struct Shape {
  int64_t layer, num_heads, num_kv_heads, size;
  float softmax_scale;
  int64_t window, sinks;  // the first `sinks` keys are part of the window wherever it is
  int64_t oldest_seen(int64_t position) const {  // sinks aside
    const int64_t oldest = position + 1 - (window - sinks);
    return window > 0 && oldest > 0 ? oldest : 0;
  }
  int64_t heads_per_group() const { return num_heads / num_kv_heads; }
  int64_t padded_size() const { return (size + kLanes - 1) / kLanes * kLanes; }
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

  // Keys [first, first + count) along `path`. Those of the next tile, `ahead` keys in the order of their
  // positions, are brought into the processor's cache meanwhile, as they are in pages all over the
  // memory: a few after each part of this tile, since it would wait for all at once.
  template <class C>
  void read(const Step& step, const Shape& shape, const int32_t* blocks, int64_t kv_head,
            const Path& path, int64_t first, int64_t count, int64_t ahead) {
    using E = typename C::Element;
    const int64_t size = shape.size, padded = shape.padded_size();
    const int64_t plane = shape.num_kv_heads * step.tokens_per_block * size;  // from K to V
    const int64_t squares = kTileKeys / kLanes * (padded / kLanes);
    const E *rows[kTileKeys], *next[kTileKeys];
    find(step, shape, blocks, kv_head, path, first, count, rows);
    find(step, shape, blocks, kv_head, Path{}, first + kTileKeys, ahead, next);
    int64_t done = 0, asked = 0;
    for (int64_t j0 = 0; j0 < kTileKeys; j0 += kLanes) {
      for (int64_t d = 0; d < padded; d += kLanes) {
        V square[kLanes];
        for (int j = 0; j < kLanes; ++j) {
          square[j] = j0 + j < count ? load_some<C>(rows[j0 + j] + d, size - d) : set(0.0f);
        }
        transpose(square);
        for (int i = 0; i < kLanes; ++i) store(keys + (d + i) * kTileKeys + j0, square[i]);
        const int64_t until = ahead * ++done / squares;
        for (; asked < until; ++asked) prefetch(next[asked], size);
      }
    }
    for (int64_t j = 0; j < kTileKeys; ++j) {
      for (int64_t d = 0; d < padded; d += kLanes) {
        const V value = j < count ? load_some<C>(rows[j] + plane + d, size - d) : set(0.0f);
        store(values + j * padded + d, value);
      }
      if (j < ahead) prefetch(next[j] + plane, size);
    }
  }

 private:
  template <class E>
  static void find(const Step& step, const Shape& shape, const int32_t* blocks, int64_t kv_head,
                   const Path& path, int64_t first, int64_t count, const E** rows) {
    const int64_t per_block = step.tokens_per_block;
    for (int64_t j = 0; j < count; ++j) {
      const int64_t at = path.place(first + j);
      const int64_t block = blocks[at / per_block], offset = at % per_block;
      const int64_t page = (shape.layer * step.num_blocks + block) * 2 * shape.num_kv_heads;
      rows[j] = static_cast<const E*>(step.kv_cache) +
                ((page + kv_head) * per_block + offset) * shape.size;
    }
  }
  // Always inlined, as compilers take a function that only prefetches for one without effect.
  template <class E>
  __attribute__((always_inline)) static void prefetch(const E* row, int64_t size) {
    for (int64_t at = 0; at < size; at += kCacheLine / (int64_t)sizeof(E)) {
      __builtin_prefetch(row + at);
    }
  }
};

}  // namespace
}  // namespace LLMCTL_ISA
}  // namespace llmctl
