// Which ids of a row survive its filters: the selection behind top-k and top-p.
//
// No std:: containers or algorithms here: their instantiations would be shared between the
// instruction-set variants, and the linker might keep one that this CPU cannot run.
#pragma once

#include <cstdlib>
#include <new>

#include "noise.h"

namespace llmctl {
namespace LLMCTL_ISA {

// Memory that grows and is kept for the next row. Contents are lost when it grows.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }
  T* room(int64_t count) {
    if (count > capacity_) {
      std::free(data_);
      capacity_ = 0;
      data_ = static_cast<T*>(std::malloc(count * sizeof(T)));
      if (data_ == nullptr) throw std::bad_alloc();
      capacity_ = count;
    }
    return data_;
  }

 private:
  T* data_ = nullptr;
  int64_t capacity_ = 0;
};

struct Item {
  double value;
  int64_t id;
};

// Larger values first, among equals the lower id.
static inline bool precedes(Item a, Item b) {
  return (a.value > b.value) | ((a.value == b.value) & (a.id < b.id));
}

static inline Item middle(Item a, Item b, Item c) {
  if (precedes(b, a)) {
    const Item t = a;
    a = b;
    b = t;
  }
  return precedes(c, a) ? a : precedes(c, b) ? c : b;
}

static inline void sort_few(Item* items, int64_t count) {
  for (int64_t i = 1; i < count; ++i) {
    const Item item = items[i];
    int64_t j = i;
    for (; j > 0 && precedes(item, items[j - 1]); --j) items[j] = items[j - 1];
    items[j] = item;
  }
}

// Moves the shortest run of first items (by `precedes`) to the front that leaves at most `cut` of
// the weight `total` behind it, at least one item; returns its length. An item weighs its value,
// or 1 with kByCount. Quickselect: neither side of the border is sorted.
template <bool kByCount>
static int64_t select_first(Item* items, int64_t count, double total, double cut, Item* spare) {
  const auto weight = [](Item item) { return kByCount ? 1.0 : item.value; };
  int64_t low = 0, high = count;  // the border lies between
  double before = 0;              // weight of the items in front of low
  while (high - low > 24) {
    const Item pivot = middle(items[low], items[(low + high) / 2], items[high - 1]);
    int64_t front = low, back = 0;
    double mass = 0;
    for (int64_t i = low; i < high; ++i) {
      const Item item = items[i];
      const bool is_front = precedes(item, pivot);
      spare[back] = item;
      items[front] = item;
      front += is_front;
      back += !is_front;
      mass += is_front ? weight(item) : 0.0;
    }
    std::memcpy(items + front, spare, back * sizeof(Item));
    if (total - (before + mass) <= cut) {
      high = front;
    } else {
      before += mass;
      low = front;
    }
  }
  sort_few(items + low, high - low);
  while (low < high && (low == 0 || total - before > cut)) before += weight(items[low++]);
  return low;
}

// Writes the ids whose logit is at least `bound` to `ids` (room for `vocab`), ascending.
static int64_t collect(const float* row, int64_t vocab, float bound, int32_t* ids) {
  int64_t count = 0, i = 0;
  for (; i + 4 * kLanes <= vocab; i += 4 * kLanes) {
    const V first = max(load(row + i), load(row + i + kLanes));
    const V second = max(load(row + i + 2 * kLanes), load(row + i + 3 * kLanes));
    if (largest(max(first, second)) < bound) continue;
    for (int64_t j = i; j < i + 4 * kLanes; ++j) {
      ids[count] = static_cast<int32_t>(j);
      count += row[j] >= bound;
    }
  }
  for (; i < vocab; ++i) {
    ids[count] = static_cast<int32_t>(i);
    count += row[i] >= bound;
  }
  return count;
}

// The k-th largest logit, 1 <= k < vocab. Maxima of groups bound it from below (k groups hold at
// least k logits that large), so only a few more than k logits are looked at closely.
static float kth_largest(const float* row, int64_t vocab, int64_t k, int32_t* ids,
                         Buffer<Item>& items, Buffer<Item>& spare) {
  const int64_t vectors = vocab / kLanes;
  const int64_t wanted = k / 4 + 1;  // vectors of maxima: four times as many groups as needed
  const int64_t stride = vectors > 2 * wanted ? vectors / wanted : 1;
  Item* maxima = items.room(vocab);
  Item* other = spare.room(vocab);
  int64_t count = 0;
  for (int64_t i = 0; i < vectors; i += stride) {
    V best = load(row + i * kLanes);
    for (int64_t j = i + 1; j < i + stride && j < vectors; ++j) {
      best = max(load(row + j * kLanes), best);
    }
    float lanes[kLanes];
    store(lanes, best);
    for (float lane : lanes) {
      maxima[count] = {lane, count};
      ++count;
    }
  }
  for (int64_t i = vectors * kLanes; i < vocab; ++i) {
    maxima[count] = {row[i], count};
    ++count;
  }
  const auto kth = [&](int64_t size) {
    const double total = static_cast<double>(size), cut = static_cast<double>(size - k);
    select_first<true>(maxima, size, total, cut, other);
    double smallest = maxima[0].value;
    for (int64_t i = 1; i < k; ++i) {
      smallest = maxima[i].value < smallest ? maxima[i].value : smallest;
    }
    return static_cast<float>(smallest);
  };
  const float bound = kth(count);
  if (count == vocab) return bound;  // every logit was its own group
  const int64_t near = collect(row, vocab, bound, ids);
  for (int64_t i = 0; i < near; ++i) maxima[i] = {row[ids[i]], i};
  return kth(near);
}

}  // namespace LLMCTL_ISA
}  // namespace llmctl
