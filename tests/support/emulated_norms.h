// norm_math.cuh, of BF16 rows, on a CPU: after the macros HIDDEN and ROW_WARPS, and emulated_cuda.h.
struct Model {
  static float low(u32 x) { return BF16::unpack(u16(x)); }
  static float high(u32 x) { return BF16::unpack(u16(x >> 16)); }
};
DEVICE u32 e4m3(float x) {  // nearest even, saturated
  const float size = std::min(std::fabs(x), 448.0f);
  int exponent;
  std::frexp(size, &exponent);
  const int power = size > 0 ? std::max(exponent - 1, -6) : -6;  // of the leading bit
  const u32 eighths = u32(std::nearbyint(std::ldexp(size, 3 - power)));
  return (std::signbit(x) ? 0x80 : 0) | (((power + 6) << 3) + eighths);
}
struct Divisor {
  float scale;
  explicit Divisor(float scale_) : scale(scale_) {}
  u32 pair(u32 y) const { return e4m3(Model::low(y) / scale) | e4m3(Model::high(y) / scale) << 8; }
  uint2 unit(const uint4& y) const {
    return {pair(y.x) | pair(y.y) << 16, pair(y.z) | pair(y.w) << 16};
  }
};
DEVICE u32 add_pair(u32 a, u32 b) {
  return BF16::pack_pair(Model::low(a) + Model::low(b), Model::high(a) + Model::high(b));
}
DEVICE uint4 add_units(const uint4& a, const uint4& b) {
  return {add_pair(a.x, b.x), add_pair(a.y, b.y), add_pair(a.z, b.z), add_pair(a.w, b.w)};
}
DEVICE float square_sum(const uint4& h, float sum = 0) {
  for (u32 x : {h.x, h.y, h.z, h.w}) {
    sum += Model::low(x) * Model::low(x) + Model::high(x) * Model::high(x);
  }
  return sum;
}
DEVICE u32 normal_pair(u32 h, u32 factor, float inverse) {
  const u32 normal = BF16::pack_pair(Model::low(h) * inverse, Model::high(h) * inverse);
  return BF16::pack_pair(Model::low(normal) * Model::low(factor),
                         Model::high(normal) * Model::high(factor));
}
DEVICE uint4 normal_unit(const uint4& h, const uint4& factors, float inverse) {
  return {normal_pair(h.x, factors.x, inverse), normal_pair(h.y, factors.y, inverse),
          normal_pair(h.z, factors.z, inverse), normal_pair(h.w, factors.w, inverse)};
}
DEVICE float inverse_rms_of(u32 squares, float epsilon) {
  const float* parts = (const float*)(own_block->memory + squares);
  float sum = 0;
  for (int i = 0; i < ROW_WARPS; ++i) sum += parts[i];
  return 1.0f / std::sqrt(sum / HIDDEN + epsilon);
}
