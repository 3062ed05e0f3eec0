// What tests/include/test_codec.py calls: the header's functions over arrays, with C's calling convention.
#include <fourbits/codec.hpp>

using namespace fourbits;

static_assert(encode_e2m1(SIX) == 7 && decode_e4m3(0x7E) == E4M3_LARGEST, "scalar functions are constant expressions");

extern "C" {

void multiply_all(const Bits* a, const Bits* b, Bits* out, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) out[i] = multiply(a[i], b[i]);
}

void divide_all(const Bits* a, const Bits* b, Bits* out, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) out[i] = divide(a[i], b[i]);
}

void encode_all(int grid, const Bits* v, std::uint8_t* out, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) out[i] = grid == 4 ? encode_e2m1(v[i]) : encode_e4m3(v[i]);
}

void encode_stochastic_all(int noise_bits, const Bits* v, const Bits* noise, std::uint8_t* out, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) out[i] = encode_e2m1_stochastic(v[i], noise[i], noise_bits);
}

void decode_all(int grid, const std::uint8_t* codes, Bits* out, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i)
        out[i] = grid == 4 ? decode_e2m1(codes[i]) : grid == 8 ? decode_e4m3(codes[i]) : decode_e8m0(codes[i]);
}

// options: format, block rows, block columns, rounding, te_compat, ceil_scales; key: the five of Key.
void quantize_matrix(const std::size_t* options, const Bits* key, const float* data, const std::size_t* sizes_and_strides,
                     const float* amax, std::uint8_t* codes, std::uint8_t* block_scale, Bits* global_scale, Bits* values) {
    const Spec spec{static_cast<Format>(options[0]), options[1], options[2], static_cast<Rounding>(options[3]),
                    options[4] != 0, options[5] != 0, {key[0], key[1], key[2], key[3], key[4]}};
    const std::size_t* s = sizes_and_strides;
    const Operand q = quantize({data, s[0], s[1], s[2], s[3]}, spec, amax);
    std::memcpy(codes, q.codes.data(), q.codes.size());
    std::memcpy(block_scale, q.block_scale.data(), q.block_scale.size());
    *global_scale = q.global_scale;
    for (std::size_t i = 0; i < q.rows; ++i)
        for (std::size_t j = 0; j < q.columns; ++j) values[i * q.columns + j] = dequantize(q, i, j);
}

}  // extern "C"
