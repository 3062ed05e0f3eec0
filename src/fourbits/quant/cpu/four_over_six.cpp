// Four Over Six, choice and codes in one reading of the tensor: docs/nvfp4.md, sections 7.1, 7.4 and 7.5.
//
// Works on panels of 16 lines by 16 elements along the contraction; a line holds a row of a block. Vectors run over
// the lines, so that sums keep the specified order and nothing is added across a vector.
// To be compiled without contraction to FMA, and by a compiler with vector extensions (GCC, Clang).

#include <cstdint>
#include <cstring>

namespace {

constexpr int kLines = 16;
constexpr int kElements = 16;
constexpr int kColumns = 512;
constexpr std::int32_t kMagnitude = 0x7FFFFFFF;
constexpr std::int32_t kInfinity = 0x7F800000;
constexpr float kLargest = 3.4028234663852886e38f;

typedef float Floats __attribute__((vector_size(4 * kLines)));
typedef std::int32_t Ints __attribute__((vector_size(4 * kLines)));
typedef std::uint16_t Halves __attribute__((vector_size(2 * kLines)));

// Lanes of a and, from 16 on, of b.
#if defined(__clang__)
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

enum Metric { kMse, kMae, kMax };

// What all blocks share, docs/nvfp4.md, section 7.5: S_enc, S_dec, u, and what (q * s) is multiplied and divided by.
struct Level {
  float encode, decode, shift, factor, target;
};

struct Candidate {
  Floats scale, encode;
  Floats one;   // what an element of 1 stands for, shifted by u
  Floats half;  // twice what an element of 1.5 stands for beyond that
  Floats error;
};

inline Ints bits_of(Floats value) { return (Ints)value; }
inline Floats floats_of(Ints bits) { return (Floats)bits; }
inline Ints lesser(Ints a, Ints b) { return a < b ? a : b; }
inline Ints greater(Ints a, Ints b) { return a > b ? a : b; }

// Magnitudes compare as their bits do.
inline Floats at_most(Floats magnitude, float limit) {
  return floats_of(lesser(bits_of(magnitude), bits_of(Floats{} + limit)));
}

// Magnitudes to the nearest number of kKept fraction bits, ties to even, no finer than numbers at `least`.
template <int kKept>
inline Floats nearest(Floats magnitude, float least) {
  const float big = static_cast<float>(1 << (23 - kKept));
  const Floats floor = Floats{} + least * (big + 2.0f);
  const Floats large = floats_of(greater(bits_of(magnitude * big), bits_of(floor)));
  return large - (large - magnitude);
}

inline Floats nearest_e2m1(Floats magnitude) { return nearest<1>(at_most(magnitude, 6.0f), 1.0f); }
inline Floats nearest_e4m3(Floats magnitude) { return nearest<3>(at_most(magnitude, 448.0f), 0.015625f); }

inline Candidate candidate(Floats wanted, const Level& level) {
  Candidate made;
  made.scale = nearest_e4m3(wanted);
  made.encode = at_most(1.0f / (made.scale * level.decode), kLargest);
  made.one = made.scale * level.factor / level.target;
  made.half = 2.0f * (made.scale * 1.5f * level.factor / level.target - made.one);
  made.error = Floats{};
  return made;
}

template <int kMetric>
inline Floats joined(Floats error, Floats other) {
  return kMetric == kMax ? floats_of(greater(bits_of(error), bits_of(other))) : error + other;
}

// The error with one element more. An element is a power of two, or that and a half of it; both quotients of the
// specification differ from those of 1 and 1.5 by a power of two only, and their difference is exact.
template <int kMetric>
inline Floats error_with(const Candidate& made, Floats magnitude, Floats shifted) {
  const Floats element = nearest_e2m1(magnitude * made.encode);
  const Floats power = floats_of(bits_of(element) & kInfinity);
  const Floats deviation = power * made.one + (element - power) * made.half - shifted;
  const Floats term = kMetric == kMse ? deviation * deviation : floats_of(bits_of(deviation) & kMagnitude);
  return joined<kMetric>(made.error, term);
}

// Every lane joined with the ones 8, 4, 2 and 1 further on, around the end: all lanes hold the halving tree.
template <typename Vector, typename Join>
inline Vector over_lines(Vector v, Join join) {
  v = join(v, PICK(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = join(v, PICK(v, v, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3));
  v = join(v, PICK(v, v, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1));
  return join(v, PICK(v, v, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0));
}

// E2M1 codes of the magnitudes: from 1 on, bits 22 and up less those of 0.5; below, 0.5 or nothing.
inline Ints magnitude_codes(Floats magnitude) {
  const Ints rounded = bits_of(nearest_e2m1(magnitude));
  return rounded < 0x3F800000 ? (rounded >> 29) & 1 : (rounded >> 22) - 252;
}

// Elements times their blocks' scales, exact in BF16, with the signs of `bits`: BF16 in the upper halves.
inline Ints values_of(Ints bits, Floats encode, Floats scale) {
  const Floats magnitude = nearest_e2m1(floats_of(bits & kMagnitude) * encode) * scale;
  return bits_of(magnitude) | (bits & ~kMagnitude);
}

// Rows become columns: four times, rows i and i + 8 are interleaved.
inline void transpose(Ints* rows) {
  for (int round = 0; round < 4; ++round) {
    Ints mixed[kLines];
    for (int i = 0; i < kLines / 2; ++i) {
      const Ints a = rows[i], b = rows[i + kLines / 2];
      mixed[2 * i] = PICK(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      mixed[2 * i + 1] = PICK(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    std::memcpy(rows, mixed, sizeof mixed);
  }
}

enum Result { kNonFinite = 1, kInvalid = 2 };

struct Operand {
  const std::uint16_t* x;  // BF16
  std::int64_t lines, elements, stride;
  bool along_rows;  // the contraction runs along the rows of x
  bool square, te_compat;
  float* scales;
  std::uint64_t* words;   // the codes, or null for
  std::uint16_t* values;  // elements times scales, BF16, rows one after another
};

inline std::int64_t row_of(const Operand& operand, std::int64_t line, std::int64_t element) {
  return operand.along_rows ? line : element;
}

inline std::int64_t column_of(const Operand& operand, std::int64_t line, std::int64_t element) {
  return operand.along_rows ? element : line;
}

// Elements of a panel as the bits of numbers, one vector per place along the contraction.
inline void read(const Operand& operand, std::int64_t line, std::int64_t element, Ints* panel) {
  const std::int64_t row = row_of(operand, line, element), column = column_of(operand, line, element);
  for (int i = 0; i < kLines; ++i) {
    Halves row_bits;
    std::memcpy(&row_bits, operand.x + (row + i) * operand.stride + column, sizeof row_bits);
    panel[i] = __builtin_convertvector(row_bits, Ints) << 16;
  }
  if (operand.along_rows) transpose(panel);
}

// The reverse of `read`, for values.
inline void write(const Operand& operand, std::int64_t line, std::int64_t element, Ints* panel) {
  if (operand.along_rows) transpose(panel);
  const std::int64_t row = row_of(operand, line, element), column = column_of(operand, line, element);
  const std::int64_t columns = operand.along_rows ? operand.elements : operand.lines;
  for (int i = 0; i < kLines; ++i) {
    const Halves row_bits = __builtin_convertvector((panel[i] >> 16) & 0xFFFF, Halves);
    std::memcpy(operand.values + (row + i) * columns + column, &row_bits, sizeof row_bits);
  }
}

struct Chosen {
  Floats scale, encode;
};

template <bool kSquare, int kMetric>
inline Chosen choose(const Ints* panel, Floats block_amax, const Level& level) {
  const Floats to_six = block_amax / 6.0f * level.encode;
  Candidate six = candidate(to_six, level), four = candidate(to_six * 1.5f, level);
  for (int i = 0; i < kElements; ++i) {
    const Floats magnitude = floats_of(panel[i] & kMagnitude);
    const Floats shifted = magnitude * level.shift;
    six.error = error_with<kMetric>(six, magnitude, shifted);
    four.error = error_with<kMetric>(four, magnitude, shifted);
  }
  if (kSquare) {
    six.error = over_lines(six.error, joined<kMetric>);
    four.error = over_lines(four.error, joined<kMetric>);
  }
  const Ints take_four = four.error < six.error;
  return {take_four ? four.scale : six.scale, take_four ? four.encode : six.encode};
}

// Scales and codes of one panel. Returns the bits of its lines' largest magnitudes.
template <bool kSquare, int kMetric>
inline Ints quantize_panel(const Operand& operand, const Level& level, std::int64_t first, std::int64_t block) {
  const std::int64_t blocks = operand.elements / kElements;
  Ints panel[kElements], largest = {};
  read(operand, first, block * kElements, panel);
  for (const Ints& bits : panel) largest = greater(largest, bits & kMagnitude);
  if (kSquare) largest = over_lines(largest, greater);
  Chosen chosen = choose<kSquare, kMetric>(panel, floats_of(largest), level);
  if (!operand.te_compat) chosen.encode = chosen.scale == 0.0f ? Floats{} : chosen.encode;
  for (int line = 0; line < (kSquare ? 1 : kLines); ++line)
    operand.scales[(kSquare ? first / kLines : first + line) * blocks + block] = chosen.scale[line];
  if (operand.words == nullptr) {
    for (Ints& bits : panel) bits = values_of(bits, chosen.encode, chosen.scale);
    write(operand, first, block * kElements, panel);
    return largest;
  }
  Ints halves[2] = {};
  for (int i = kElements - 1; i >= 0; --i) {
    const Ints code = magnitude_codes(floats_of(panel[i] & kMagnitude) * chosen.encode) | ((panel[i] >> 28) & 8);
    halves[i / 8] = (halves[i / 8] << 4) | code;
  }
  for (int line = 0; line < kLines; ++line) {
    const std::uint64_t high = static_cast<std::uint32_t>(halves[1][line]);
    operand.words[(first + line) * blocks + block] = high << 32 | static_cast<std::uint32_t>(halves[0][line]);
  }
  return largest;
}

// Lines `first` to `end`. Returns whether they hold a NaN or an infinity.
template <bool kSquare, int kMetric>
bool quantize_lines(const Operand& operand, const Level& level, std::int64_t first, std::int64_t end) {
  Ints largest = {};
  for (std::int64_t block = 0; block < operand.elements / kElements; ++block)
    for (std::int64_t line = first; line < end; line += kLines)
      largest = greater(largest, quantize_panel<kSquare, kMetric>(operand, level, line, block));
  return over_lines(largest, greater)[0] >= kInfinity;
}

template <int kMetric>
bool quantize_lines(const Operand& operand, const Level& level, std::int64_t first, std::int64_t end) {
  return operand.square ? quantize_lines<true, kMetric>(operand, level, first, end)
                        : quantize_lines<false, kMetric>(operand, level, first, end);
}

}  // namespace

// x: BF16, two dimensions, rows `stride` apart; lines and elements are multiples of 16; scales: fp32
// [lines, elements / 16], or [lines / 16, elements / 16] for square blocks; words: [lines, elements / 16], the codes
// of a block, the first lowest; or null, and then values: BF16 in the shape of x. Returns kNonFinite if x holds a NaN
// or an infinity: then the rest means nothing; kInvalid, with nothing read or written, for other sizes, or for
// pointers that are missing; otherwise 0.
extern "C" int four_over_six(const std::uint16_t* x, std::int64_t lines, std::int64_t elements, std::int64_t stride,
                             int along_rows, int square, int metric, int te_compat, float encode, float decode,
                             float shift, float factor, float target, float* scales, std::uint64_t* words,
                             std::uint16_t* values, int threads) {
  const std::int64_t row = along_rows ? elements : lines;
  if (!x || !scales || !words == !values || lines < 1 || elements < 1 || lines % 16 || elements % 16 || stride < row ||
      metric < kMse || metric > kMax || threads < 1)
    return kInvalid;
  const Level level{encode, decode, shift, factor, target};
  const Operand operand{x, lines, elements, stride, along_rows != 0, square != 0, te_compat != 0, scales, words, values};
  const std::int64_t share = along_rows ? kLines : kColumns;  // so that rows are read along, not across
  int non_finite = 0;
#pragma omp parallel for num_threads(threads) reduction(| : non_finite) schedule(static)
  for (std::int64_t first = 0; first < lines; first += share) {
    const std::int64_t end = first + share < lines ? first + share : lines;
    non_finite |= metric == kMse   ? quantize_lines<kMse>(operand, level, first, end)
                  : metric == kMae ? quantize_lines<kMae>(operand, level, first, end)
                                   : quantize_lines<kMax>(operand, level, first, end);
  }
  return non_finite ? kNonFinite : 0;
}
