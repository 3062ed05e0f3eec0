// NVFP4 and MXFP4 in one header: C++17, the standard library, and not one floating-point operation.
//
// A number is its binary32 bit pattern (Bits). Multiplication, division and every rounding below are integer code,
// so the bytes are those of docs/nvfp4.md under any compiler flag (-ffast-math, FMA contraction, x87, flush to zero)
// and on machines without a floating-point unit. The scalar functions are constexpr. Section numbers refer to
// docs/nvfp4.md; the names are its names.
//
// Not here: the Hadamard transform (9), error-driven scale rules (7.5), stochastic scales and MS-EDEN (7.6, 7.7).
#ifndef FOURBITS_CODEC_HPP
#define FOURBITS_CODEC_HPP

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace fourbits {

using Bits = std::uint32_t;  // the pattern of a binary32 number

constexpr Bits SIGN = 0x80000000, INF = 0x7F800000, QUIET_NAN = 0x7FC00000, FMAX = 0x7F7FFFFF;
constexpr Bits ONE = 0x3F800000, SIX = 0x40C00000, SIXTH = 0x3E2AAAAB, E4M3_LARGEST = 0x43E00000;
constexpr Bits RANGE = 0x45280000;  // 2688, the largest code times the largest scale

inline Bits bits_of(float x) {
    Bits bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float float_of(Bits bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

constexpr Bits magnitude(Bits x) { return x & ~SIGN; }
constexpr bool is_finite(Bits x) { return magnitude(x) < INF; }
constexpr Bits smaller(Bits a, Bits b) { return a < b ? a : b; }  // of magnitudes: patterns are ordered as numbers are

// ---- 1. binary32 arithmetic, rounded to nearest even ----

// |x| = significand * 2^exponent, exactly. x is finite.
struct Parts {
    std::uint64_t significand;
    int exponent;
};

constexpr Parts parts(Bits x) {
    const Bits field = magnitude(x) >> 23, fraction = x & 0x7FFFFF;
    return field ? Parts{fraction | 0x800000, static_cast<int>(field) - 150} : Parts{fraction, -149};
}

// The magnitude code, on a float grid, nearest to significand * 2^exponent (and a rest below its last bit); ties to
// the even code. digits: significant bits of a normal number; lowest: exponent of the smallest one of all.
constexpr Bits nearest_code(Parts x, bool rest, int digits, int lowest) {
    int length = 0;
    while (length < 64 && x.significand >> length) ++length;
    const int keep = length - digits, floor = lowest - x.exponent;
    const int drop = keep > floor ? keep : floor;  // bits below the last place of the grid
    if (length == 0 || drop > 64) return 0;
    std::uint64_t whole = 0;
    if (drop <= 0) {
        whole = x.significand << -drop;
    } else {
        whole = drop == 64 ? 0 : x.significand >> drop;
        const std::uint64_t half = std::uint64_t{1} << (drop - 1), lost = x.significand - (drop == 64 ? 0 : whole << drop);
        if (lost > half || (lost == half && (rest || (whole & 1)))) ++whole;
    }
    // A carry into the next binade, and out of the subnormals, adds up by itself.
    return (static_cast<Bits>(x.exponent + drop - lowest) << (digits - 1)) + static_cast<Bits>(whole);
}

constexpr Bits to_binary32(Parts x, bool rest) { return smaller(nearest_code(x, rest, 24, -149), INF); }

// a * b for finite a and b; may be infinite.
constexpr Bits multiply(Bits a, Bits b) {
    const Parts x = parts(a), y = parts(b);
    return ((a ^ b) & SIGN) | to_binary32({x.significand * y.significand, x.exponent + y.exponent}, false);
}

// a / b for magnitudes, a normal and b finite; infinite for b = 0.
constexpr Bits divide(Bits a, Bits b) {
    const Parts x = parts(a), y = parts(b);
    if (y.significand == 0) return INF;
    const std::uint64_t dividend = x.significand << 38;
    return to_binary32({dividend / y.significand, x.exponent - 38 - y.exponent}, dividend % y.significand != 0);
}

// ---- 4. Codecs ----

// E2M1: bit 3 is the sign, kept for zero too; above 6 is 6; NaN is code 7.
constexpr std::uint8_t encode_e2m1(Bits v) {
    const Bits a = magnitude(v);
    if (a > INF) return 7;
    const int m = (a > 0x3E800000) + (a >= 0x3F400000) + (a > 0x3FA00000) + (a >= 0x3FE00000) + (a > 0x40200000) +
                  (a >= 0x40600000) + (a > 0x40A00000);
    return static_cast<std::uint8_t>((v >> 28 & 8) | static_cast<Bits>(m));
}

constexpr Bits decode_e2m1(std::uint8_t code) {
    constexpr Bits grid[8] = {0, 0x3F000000, ONE, 0x3FC00000, 0x40000000, 0x40400000, 0x40800000, SIX};
    return (static_cast<Bits>(code) & 8) << 28 | grid[code & 7];
}

// E4M3: above 448 is 448 (infinity too); NaN is 0x7F.
constexpr std::uint8_t encode_e4m3(Bits v) {
    const Bits a = magnitude(v);
    if (a > INF) return 0x7F;
    return static_cast<std::uint8_t>((v >> 24 & 0x80) | nearest_code(parts(smaller(a, E4M3_LARGEST)), false, 4, -9));
}

constexpr Bits decode_e4m3(std::uint8_t code) {
    const Bits sign = (static_cast<Bits>(code) & 0x80) << 24, field = code >> 3 & 15u, fraction = code & 7u;
    if ((code & 0x7F) == 0x7F) return sign | QUIET_NAN;
    const Parts value = field ? Parts{fraction | 8, static_cast<int>(field) - 10} : Parts{fraction, -9};
    return sign | to_binary32(value, false);
}

// E8M0: 2^(code - 127); 0xFF is NaN.
constexpr Bits decode_e8m0(std::uint8_t code) {
    if (code == 0xFF) return QUIET_NAN;
    return code ? static_cast<Bits>(code) << 23 : 0x00400000;
}

// ---- 11. Random bits ----

using Words = std::array<Bits, 4>;

// Philox4x32 with 7 rounds.
constexpr Words philox(Words c, Bits k0, Bits k1) {
    for (int round = 0; round < 7; ++round) {
        const std::uint64_t a = std::uint64_t{0xD2511F53} * c[0], b = std::uint64_t{0xCD9E8D57} * c[2];
        c = {static_cast<Bits>(b >> 32) ^ c[1] ^ k0, static_cast<Bits>(b), static_cast<Bits>(a >> 32) ^ c[3] ^ k1,
             static_cast<Bits>(a)};
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return c;
}

// sr_key of 11.2: stream = layer * 8 + role.
struct Key {
    Bits seed = 0, stream = 0, step = 0, first_row = 0, first_block = 0;
};

// 8 random bits of element (row, column) of the stored matrix, for sr; 24 of them, for sr32.
constexpr Bits random_byte(const Key& key, std::size_t row, std::size_t column) {
    const Words w = philox({key.step, key.first_block + static_cast<Bits>(column / 16),
                            key.first_row + static_cast<Bits>(row), 0}, key.seed, key.stream);
    const std::size_t t = column % 16;
    return w[t / 4] >> 8 * (t % 4) & 255;
}

constexpr Bits random_24(const Key& key, std::size_t row, std::size_t column) {
    const std::size_t t = column % 16;
    const Words w = philox({key.step, key.first_block + static_cast<Bits>(column / 16),
                            key.first_row + static_cast<Bits>(row), static_cast<Bits>(t / 4)}, key.seed, key.stream);
    return w[t % 4] >> 8;
}

// ---- 10. Stochastic rounding onto E2M1 ----

// noise: that many random bits, 8 (sr: up if noise + floor(256 f) >= 256) or 24 (sr32: up if noise * 2^-24 < f).
constexpr std::uint8_t encode_e2m1_stochastic(Bits v, Bits noise, int noise_bits) {
    if (magnitude(v) > INF) return 7;
    const Bits a = smaller(magnitude(v), SIX);
    Bits low = 7;
    while (decode_e2m1(static_cast<std::uint8_t>(low)) > a) --low;
    // a in units of 2^-(noise_bits + 1), rounded down, with `rest` for what was cut off; then f in noise units
    const Parts x = parts(a);
    const int cut = -(x.exponent + noise_bits + 1);
    const std::uint64_t fixed = cut >= 64 ? 0 : cut >= 0 ? x.significand >> cut : x.significand << -cut;
    bool rest = cut >= 64 ? x.significand != 0 : cut > 0 && (fixed << cut) != x.significand;
    const std::uint64_t halves[8] = {0, 1, 2, 3, 4, 6, 8, 12};  // the grid in units of 1/2
    const std::uint64_t above = fixed - (halves[low] << noise_bits);
    const int widen = low < 4 ? 0 : low < 6 ? 1 : 2;  // step 0.5, 1, 2
    const std::uint64_t f = above >> widen;
    rest = rest || (f << widen) != above;
    const bool up = noise_bits == 8 ? noise + f >= 256 : noise < f || (noise == f && rest);
    return static_cast<std::uint8_t>((v >> 28 & 8) | (low + up));
}

// ---- 5 to 8. Operands ----

// A matrix of floats as it is stored: rows, and the contraction along columns. For axis 0 swap sizes and strides.
struct Matrix {
    const float* data;
    std::size_t rows, columns, row_stride, column_stride;
    Bits at(std::size_t i, std::size_t j) const { return bits_of(data[i * row_stride + j * column_stride]); }
};

enum class Rounding { rne, sr, sr32 };
enum class Format { nvfp4, mxfp4 };

struct Spec {
    Format format = Format::nvfp4;
    std::size_t block_rows = 1, block_columns = 16;
    Rounding rounding = Rounding::rne;
    bool te_compat = true;     // NVFP4: codes of underflowed blocks as TransformerEngine's; else zeros
    bool ceil_scales = false;  // MXFP4: scales rounded up
    Key key = {};
};

// codes: [rows, padded / 2], even column in the low nibble; block_scale: [block_rows, block_columns] E4M3 or E8M0.
struct Operand {
    Spec spec;
    std::size_t rows, columns, padded, scale_rows, scale_columns;
    Bits global_scale = ONE;
    std::vector<std::uint8_t> codes, block_scale;

    Operand(const Spec& s, std::size_t r, std::size_t c)
        : spec(s), rows(r), columns(c), padded((c + 15) / 16 * 16) {
        if (s.block_rows == 0 || s.block_columns == 0) throw std::invalid_argument("a block has at least one element");
        scale_rows = (rows + s.block_rows - 1) / s.block_rows;
        scale_columns = (padded + s.block_columns - 1) / s.block_columns;
        codes.resize(rows * padded / 2);
        block_scale.resize(scale_rows * scale_columns);
    }
    std::uint8_t code(std::size_t i, std::size_t j) const {
        return static_cast<std::uint8_t>(codes[(i * padded + j) / 2] >> 4 * (j % 2) & 15);
    }
    void put(std::size_t i, std::size_t j, std::uint8_t code) {  // once per element
        std::uint8_t& byte = codes[(i * padded + j) / 2];
        byte = static_cast<std::uint8_t>(byte | code << 4 * (j % 2));
    }
};

// Largest magnitude of rows i0.. and columns j0.. , at most `rows` by `columns` of them; above FMAX: not finite.
inline Bits largest(const Matrix& x, std::size_t i0, std::size_t j0, std::size_t rows, std::size_t columns) {
    Bits found = 0;
    for (std::size_t i = i0; i < x.rows && i - i0 < rows; ++i)
        for (std::size_t j = j0; j < x.columns && j - j0 < columns; ++j)
            if (magnitude(x.at(i, j)) > found) found = magnitude(x.at(i, j));
    return found;
}

constexpr std::uint8_t rounded(Bits v, const Spec& spec, std::size_t i, std::size_t j) {
    if (spec.rounding == Rounding::rne) return encode_e2m1(v);
    if (spec.rounding == Rounding::sr) return encode_e2m1_stochastic(v, random_byte(spec.key, i, j), 8);
    return encode_e2m1_stochastic(v, random_24(spec.key, i, j), 24);
}

// The scale of one block, and what its elements are multiplied by. A poisoned block has the NaN scale and multiplier
// infinity; zeros says that its codes are zeros whatever its elements are.
struct BlockScale {
    std::uint8_t scale;
    Bits encode_scale;
    bool zeros;
};

// 7.1. encode_all, decode_all: S_enc and S_dec of the tensor.
constexpr BlockScale nvfp4_scale(Bits block_amax, Bits encode_all, Bits decode_all, bool te_compat) {
    if (!is_finite(block_amax)) return {0x7F, INF, false};
    const std::uint8_t scale = encode_e4m3(multiply(block_amax, multiply(encode_all, SIXTH)));
    const Bits encode = smaller(divide(ONE, multiply(decode_e4m3(scale), decode_all)), FMAX);
    return {scale, encode, scale == 0 && !te_compat};
}

// 7.2
constexpr BlockScale mxfp4_scale(Bits block_amax, bool ceil) {
    if (!is_finite(block_amax)) return {0xFF, INF, false};
    const int field = static_cast<int>(block_amax >> 23) - 2 + (ceil && (block_amax & 0x7FFFFF) > 0x400000);
    const Bits scale = field > 0 ? static_cast<Bits>(field) : 0;
    return {static_cast<std::uint8_t>(scale), (254 - scale) << 23, false};
}

// Codes and scales of x. amax: NVFP4 only, in place of the tensor's own; its sign is ignored.
inline Operand quantize(const Matrix& x, const Spec& spec, const float* amax = nullptr) {
    const bool nv = spec.format == Format::nvfp4;
    if (!nv && amax) throw std::invalid_argument("amax: mxfp4 has no scale of the whole tensor");
    Operand q(spec, x.rows, x.columns);
    const Bits all = amax ? magnitude(bits_of(*amax)) : nv ? largest(x, 0, 0, x.rows, x.columns) : 0;
    const bool poisoned = !is_finite(all);
    const Bits encode_all = all == 0 || poisoned ? ONE : smaller(divide(RANGE, all), FMAX);
    q.global_scale = divide(ONE, encode_all);
    for (std::size_t b = 0; b < q.block_scale.size(); ++b) {
        const std::size_t i0 = b / q.scale_columns * spec.block_rows, j0 = b % q.scale_columns * spec.block_columns;
        const Bits block_amax = poisoned ? INF : largest(x, i0, j0, spec.block_rows, spec.block_columns);
        const BlockScale block = nv ? nvfp4_scale(block_amax, encode_all, q.global_scale, spec.te_compat)
                                    : mxfp4_scale(block_amax, spec.ceil_scales);
        q.block_scale[b] = block.scale;
        for (std::size_t i = i0; i < x.rows && i - i0 < spec.block_rows; ++i)
            for (std::size_t j = j0; j < x.columns && j - j0 < spec.block_columns; ++j) {
                const Bits y = x.at(i, j);
                if (block.encode_scale == INF)
                    q.put(i, j, static_cast<std::uint8_t>(magnitude(y) > INF ? 7 : 7 | (y >> 28 & 8)));
                else if (block.zeros)
                    q.put(i, j, static_cast<std::uint8_t>(y >> 28 & 8));
                else
                    q.put(i, j, rounded(multiply(y, block.encode_scale), spec, i, j));
            }
    }
    return q;
}

// 8. The value of element (i, j): (code * block_scale) * global_scale.
inline Bits dequantize(const Operand& q, std::size_t i, std::size_t j) {
    const std::size_t block = i / q.spec.block_rows * q.scale_columns + j / q.spec.block_columns;
    const std::uint8_t byte = q.block_scale[block];
    const Bits scale = q.spec.format == Format::nvfp4 ? decode_e4m3(byte) : decode_e8m0(byte);
    if (!is_finite(scale)) return QUIET_NAN;
    return multiply(multiply(decode_e2m1(q.code(i, j)), scale), q.global_scale);
}

}  // namespace fourbits

#endif
