// Epilogues of the kernel for many tokens: scale, bias, round, combine; then through shared memory
// so that stores to [tokens, rows] are contiguous.
//
// A warp's accumulators of one 64-row tile are 16 rows; a thread has rows lane / 4 and lane / 4 + 8
// of them, and of every octet of tokens the two at 2 * (lane % 4). The staging area of a warpgroup
// is [64 tokens][8 units of 8 values], a unit 16 bytes, at unit XOR (token mod 8).
#pragma once

constexpr int STAGED_TOKENS = 64;
constexpr int STAGING_BYTES = STAGED_TOKENS * 128;

// ---- rounding to the model dtype, two values at a time ----

DEVICE uint32_t round_pair(float low, float high) {
    uint32_t pair;
#if MODEL == 1
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
    return pair;
}

DEVICE float widen(uint16_t value) {
    float wide;
#if MODEL == 1
    wide = __uint_as_float(uint32_t(value) << 16);
#else
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value));
#endif
    return wide;
}

DEVICE float rounded(float value) { return widen(uint16_t(round_pair(value, 0.0f))); }

// E4M3, to nearest even, clamped to +-448.
DEVICE uint16_t quantize_pair(float low, float high, float scale) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
        : "=h"(pair)
        : "f"(__fdiv_rn(high, scale)), "f"(__fdiv_rn(low, scale)));
    return pair;
}

// Eight values of the model dtype -> eight of E4M3.
DEVICE uint2 quantize_unit(uint4 unit, float scale) {
    const auto pairs = [&](uint32_t first, uint32_t second) {
        return uint32_t(quantize_pair(widen(uint16_t(first)), widen(uint16_t(first >> 16)), scale)) |
               uint32_t(quantize_pair(widen(uint16_t(second)), widen(uint16_t(second >> 16)), scale))
                   << 16;
    };
    return {pairs(unit.x, unit.y), pairs(unit.z, unit.w)};
}

DEVICE float swiglu(float gate, float up) {
    return rounded(gate / (1.0f + expf(-gate))) * up;
}

// ---- the staging area ----

DEVICE uint32_t staged(uint32_t staging, int token, int unit) {
    return staging + token * 128 + ((unit ^ (token % 8)) * 16);
}

// Four 8 x 8 fragments to their transposes; each lane gives the address of one row.
DEVICE void store_transposed(uint32_t address, const uint32_t (&fragment)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     address),
                 "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
                 : "memory");
}

DEVICE uint4 load_unit(uint32_t address) {
    uint4 unit;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(unit.x), "=r"(unit.y), "=r"(unit.z), "=r"(unit.w)
                 : "r"(address)
                 : "memory");
    return unit;
}

struct Output {
    const float* weight_scale;
    const float* x_scale;
    const uint16_t* bias;
    void* out;
    const float* scale;
    const float* rotary;
    const float* k_scale;
    const float* v_scale;
    void* kv_cache;  // of this layer
    const int* positions;
    const int* slots;
    int tokens, rows;

    DEVICE_MEMBER float token_scale(int token) const {
#if ELEMENT != 0
        return 1.0f;
#elif PER_TOKEN
        return token < tokens ? x_scale[token] : 1.0f;
#else
        return x_scale[0];
#endif
    }

    // What the product of one row and token comes to, in float32.
    struct Row {
        float scale, bias;
        DEVICE_MEMBER float operator()(float sum, float token_scale) const {
            float y = sum;
#if ELEMENT == 0
            y = __fmul_rn(y, __fmul_rn(token_scale, scale));
#endif
#if BIAS
            y = __fadd_rn(y, bias);
#endif
            return y;
        }
    };

    DEVICE_MEMBER Row row(int index) const {
        Row r{1.0f, 0.0f};
        index = min(index, (rows + 63) / 64 * 64 - 1);  // scales and biases are padded to tiles
#if ELEMENT == 0
        r.scale = weight_scale[index];
#endif
#if BIAS
        r.bias = widen(bias[index]);
#endif
        return r;
    }

#if EPILOGUE == EPILOGUE_FLOAT
    DEVICE_MEMBER void store(const float (&sum)[WG_TILES][TOKENS / 2], int row_tile, int token0,
                             uint32_t, int, int thread) const {
        const int lane = thread % 32, warp = thread / 32;
        float* to = static_cast<float*>(out);
#pragma unroll
        for (int tile = 0; tile < WG_TILES; ++tile) {
            const int first = (row_tile + tile) * 64 + warp * 16 + lane / 4;
            const Row low = row(first), high = row(first + 8);
#pragma unroll
            for (int i = 0; i < TOKENS / 4; ++i) {
                const int token = token0 + i / 2 * 8 + lane % 4 * 2 + i % 2;
                const int at = i / 2 * 4 + i % 2;
                if (token < tokens) {
                    float* line = to + size_t(token) * rows;
                    const float scale = token_scale(token);
                    if (first < rows) line[first] = low(sum[tile][at], scale);
                    if (first + 8 < rows) line[first + 8] = high(sum[tile][at + 2], scale);
                }
            }
        }
    }
#else
    // Values of the model dtype, in packed order, as they go to the staging area: for one octet of
    // tokens the fragment of rows 0..7 and that of rows 8..15.
    DEVICE_MEMBER void products(const float* sum, Row low, Row high, int token, int first,
                                uint32_t& low_pair, uint32_t& high_pair) const {
        const float scale0 = token_scale(token), scale1 = token_scale(token + 1);
        low_pair = round_pair(low(sum[0], scale0), low(sum[1], scale1));
        high_pair = round_pair(high(sum[2], scale0), high(sum[3], scale1));
#if EPILOGUE == EPILOGUE_ROPE
        const int group = first / 16, head = group / (HEAD_SIZE / 16);
        if (head < NUM_HEADS + NUM_KV_HEADS) {
            const int dimension = group % (HEAD_SIZE / 16) * 8 + first % 8;
            float a[2], b[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int position = token + i < tokens ? positions[token + i] : 0;
                const float* factors = rotary + size_t(position) * HEAD_SIZE + dimension;
                const float cosine = rounded(factors[0]), sine = rounded(factors[HEAD_SIZE / 2]);
                const float x = widen(uint16_t(low_pair >> (16 * i)));
                const float y = widen(uint16_t(high_pair >> (16 * i)));
                a[i] = __fsub_rn(rounded(__fmul_rn(x, cosine)), rounded(__fmul_rn(y, sine)));
                b[i] = __fadd_rn(rounded(__fmul_rn(y, cosine)), rounded(__fmul_rn(x, sine)));
            }
            low_pair = round_pair(a[0], a[1]);
            high_pair = round_pair(b[0], b[1]);
        }
#elif EPILOGUE == EPILOGUE_SWIGLU || EPILOGUE == EPILOGUE_SWIGLU8
        const auto combine = [](uint32_t gate, uint32_t up) {
            return swiglu(widen(uint16_t(gate)), widen(uint16_t(up)));
        };
        low_pair = round_pair(combine(low_pair, high_pair), combine(low_pair >> 16, high_pair >> 16));
#endif
    }

#if EPILOGUE == EPILOGUE_SWIGLU || EPILOGUE == EPILOGUE_SWIGLU8
    // Both row tiles at once: a tile of 64 packed rows leaves 32 columns.
    DEVICE_MEMBER void store(const float (&sum)[WG_TILES][TOKENS / 2], int row_tile, int token0,
                             uint32_t staging, int group, int thread) const {
        const int lane = thread % 32, warp = thread / 32;
        constexpr int UNITS = 4 * WG_TILES;
        constexpr int OCTETS = 4 / WG_TILES;  // of tokens in one store of four fragments
        const int width = rows / 2;
        Row low[WG_TILES], high[WG_TILES];
#pragma unroll
        for (int tile = 0; tile < WG_TILES; ++tile) {
            const int first = (row_tile + tile) * 64 + warp * 16 + lane / 4;
            low[tile] = row(first);
            high[tile] = row(first + 8);
        }
#pragma unroll
        for (int pass = 0; pass < TOKENS / STAGED_TOKENS; ++pass) {
            const int token1 = token0 + pass * STAGED_TOKENS;
            named_barrier(1 + group, 128);
#pragma unroll
            for (int step = 0; step < 8 / OCTETS; ++step) {
                uint32_t fragment[4], unused;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int tile = i % WG_TILES, octet = step * OCTETS + i / WG_TILES;
                    products(&sum[tile][(pass * 8 + octet) * 4], low[tile], high[tile],
                             token1 + octet * 8 + lane % 4 * 2, 0, fragment[i], unused);
                }
                const int i = lane / 8, tile = i % WG_TILES;
                const int token = (step * OCTETS + i / WG_TILES) * 8 + lane % 8;
                store_transposed(staged(staging, token, tile * 4 + warp), fragment);
            }
            named_barrier(1 + group, 128);
#pragma unroll
            for (int i = 0; i < STAGED_TOKENS * UNITS / 128; ++i) {
                const int token = (i * 128 + thread) / UNITS, unit = thread % UNITS;
                const int column = row_tile * 32 + unit * 8;
                if (token1 + token < tokens && column < width) {
                    const uint4 values = load_unit(staged(staging, token, unit));
                    const size_t at = size_t(token1 + token) * width + column;
#if EPILOGUE == EPILOGUE_SWIGLU8
                    *reinterpret_cast<uint2*>(static_cast<uint8_t*>(out) + at) =
                        quantize_unit(values, scale[0]);
#else
                    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(out) + at) = values;
#endif
                }
            }
        }
    }
#else
    DEVICE_MEMBER void store(const float (&sum)[WG_TILES][TOKENS / 2], int row_tile, int token0,
                             uint32_t staging, int group, int thread) const {
        const int lane = thread % 32, warp = thread / 32;
#pragma unroll
        for (int tile = 0; tile < WG_TILES; ++tile) {
            const int first = (row_tile + tile) * 64 + warp * 16 + lane / 4;
            const Row low = row(first), high = row(first + 8);
#pragma unroll
            for (int pass = 0; pass < TOKENS / STAGED_TOKENS; ++pass) {
                const int token1 = token0 + pass * STAGED_TOKENS;
                named_barrier(1 + group, 128);
#pragma unroll
                for (int step = 0; step < 4; ++step) {
                    uint32_t fragment[4];
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const int octet = step * 2 + i;
                        products(&sum[tile][(pass * 8 + octet) * 4], low, high,
                                 token1 + octet * 8 + lane % 4 * 2, first, fragment[2 * i],
                                 fragment[2 * i + 1]);
                    }
                    const int token = (step * 2 + lane / 16) * 8 + lane % 8;
                    store_transposed(staged(staging, token, warp * 2 + lane / 8 % 2), fragment);
                }
                named_barrier(1 + group, 128);
#pragma unroll
                for (int i = 0; i < STAGED_TOKENS * 8 / 128; ++i) {
                    const int token = i * 16 + thread / 8;
                    if (token1 + token < tokens) {
                        store_unit(staging, token, (row_tile + tile) * 8, thread % 8,
                                   token1 + token);
                    }
                }
            }
        }
    }

#if EPILOGUE == EPILOGUE_ROPE
    // Units of a rotated head alternate between its halves; `turn` orders a tile's units so that
    // neighbouring threads store neighbouring dimensions.
    DEVICE_MEMBER void store_unit(
        uint32_t staging, int staged_token, int first_unit, int turn, int token) const {
        constexpr int GROUPS = HEAD_SIZE / 16, ROTATED = NUM_HEADS + NUM_KV_HEADS;
        const bool rotated_tile = first_unit / (2 * GROUPS) < ROTATED;
        const int local = rotated_tile ? turn % 4 * 2 + turn / 4 : turn;
        const int unit = first_unit + local, head = unit / (2 * GROUPS);
        if (head >= ROTATED + NUM_KV_HEADS) return;
        const int place = unit % (2 * GROUPS);
        const int dimension = head < ROTATED ? place % 2 * (HEAD_SIZE / 2) + place / 2 * 8 : place * 8;
        const uint4 values = load_unit(staged(staging, staged_token, local));
        if (head < NUM_HEADS) {
            const size_t at = (size_t(token) * NUM_HEADS + head) * HEAD_SIZE + dimension;
            *reinterpret_cast<uint4*>(static_cast<uint16_t*>(out) + at) = values;
            return;
        }
        const int slot = slots[token];
        if (slot < 0) return;
        const int is_value = head >= ROTATED, kv_head = head - (is_value ? ROTATED : NUM_HEADS);
        const size_t block = size_t(slot / TOKENS_PER_BLOCK) * 2 + is_value;
        const size_t line =
            (block * NUM_KV_HEADS + kv_head) * TOKENS_PER_BLOCK + slot % TOKENS_PER_BLOCK;
        const size_t at = line * HEAD_SIZE + dimension;
#if KV_FP8
        *reinterpret_cast<uint2*>(static_cast<uint8_t*>(kv_cache) + at) =
            quantize_unit(values, (is_value ? v_scale : k_scale)[0]);
#else
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(kv_cache) + at) = values;
#endif
    }
#else
    DEVICE_MEMBER void store_unit(
        uint32_t staging, int staged_token, int first_unit, int turn, int token) const {
        const int column = (first_unit + turn) * 8;
        if (column >= rows) return;
        const uint4 values = load_unit(staged(staging, staged_token, turn));
        uint16_t* to = static_cast<uint16_t*>(out) + size_t(token) * rows + column;
        if (rows % 8 == 0) {
            *reinterpret_cast<uint4*>(to) = values;
            return;
        }
        const uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (column + i < rows) to[i] = uint16_t(words[i / 2] >> (16 * (i % 2)));
        }
    }
#endif
#endif
#endif
};
