// Detects from the softmax weights in E4M3 whether a row's base is too low, so that logits need not be compared with bases
// one by one.
#pragma once

#include "ops/paged_attention/shared/units.cuh"

// A base is raised where a weight is more than this power of two, to whose code all from 248 on are rounded. Where bases are FAR_BASE
// or more from zero, float32 is too coarse to tell by weights.
static_assert(WEIGHT_POWER + RAISE == 8.0f, "the power that LEAST_RAISING is the code of");
constexpr u32 LEAST_RAISING = 0x78;
constexpr float FAR_BASE = 65536.0f;

struct Raising {
  u32 high = 0;

  DEVICE void note(u32 four_weights) { high |= four_weights + (0x80 - LEAST_RAISING) * 0x01010101u; }
  DEVICE bool any() const { return high & 0x80808080u; }
};
