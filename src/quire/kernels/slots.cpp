// Copies token slots between pages as bits, without decoding them. Defined by cache/codecs/slots.py.
#include "common.h"

namespace quire {
namespace {

enum PartKind : int32_t { RUN, KEY_LINES, VALUE_LINES };

// A part of a page: it holds some bits of every slot. Parts are adjacent.
struct Part {
    int32_t kind, size;
};

typedef uint32_t words __attribute__((vector_size(64), aligned(4), may_alias));

// Copies the bits of `mask` from source to old: they begin at bit `from` of source, and at bit `to` of old.
template <class Word>
inline Word with_codes(Word old, Word source, uint32_t mask, int from, int to) {
    return (old & ~(mask << to)) | ((source >> from & mask) << to);
}

inline void move_run(const Part& part, const uint8_t* from, int from_slot, uint8_t* to, int to_slot) {
    from += from_slot * part.size, to += to_slot * part.size;
    switch (part.size) {
        case 1: *to = *from; break;
        case 2: std::memcpy(to, from, 2); break;
        default: std::memcpy(to, from, part.size);
    }
}

inline void move_keys(const Part& part, const uint8_t* from, int from_slot, uint8_t* to, int to_slot) {
    constexpr uint32_t MASKS[5] = {0, 0x11111111, 0x03030303, 0, 0x000f000f};   // every fourth field of both lanes
    from += 4 * (from_slot % 16), to += 4 * (to_slot % 16);
    for (int line = 0; line < part.size; line++, from += 64, to += 64) {
        uint32_t source, old;
        std::memcpy(&source, from, 4);
        std::memcpy(&old, to, 4);
        old = with_codes(old, source, MASKS[part.size], part.size * (from_slot / 16), part.size * (to_slot / 16));
        std::memcpy(to, &old, 4);
    }
}

inline void move_values(const Part& part, const uint8_t* from, int from_slot, uint8_t* to, int to_slot) {
    const int width = part.size, per_line = 16 / width;
    const auto line = [&](int slot) { return 64 * (slot / 2 / per_line); };
    const auto shift = [&](int slot) { return 16 * (slot % 2) + width * (slot / 2 % per_line); };
    const words source = *reinterpret_cast<const words*>(from + line(from_slot));
    auto* target = reinterpret_cast<words*>(to + line(to_slot));
    *target = with_codes(*target, source, (1u << width) - 1, shift(from_slot), shift(to_slot));
}

}  // namespace
}  // namespace quire

using namespace quire;

// Copies n slots. parts: of all layouts. firsts: index of each layout's first part. which [n]: the layout of each copy. pages, slots [2, n]: first
// those that are read, then those that are written. The id of a page is its offset / 128.
QUIRE_API void quire_move_slots(uint8_t* arena, const void* parts, const int32_t* firsts, const int32_t* which, const int32_t* pages,
                                const int32_t* slots, int64_t n) {
    const int32_t *to_pages = pages + n, *to_slots = slots + n;
    // Slots of a page share words, so only one thread writes a page. A thread may read other slots of that page meanwhile: their bits do not change.
    const int64_t shares = n < 1024 ? 1 : 4 * sharing_threads();
    parallel_for(shares, 1, [&](int64_t share) {
        for (int64_t i = 0; i < n; i++) {
            if (shares > 1 && static_cast<int64_t>((static_cast<uint32_t>(to_pages[i]) * 2654435761u) >> 16) * shares >> 16 != share) continue;
            const uint8_t* from = arena + static_cast<int64_t>(pages[i]) * 128;
            uint8_t* to = arena + static_cast<int64_t>(to_pages[i]) * 128;
            const Part* part = static_cast<const Part*>(parts) + firsts[which[i]];
            for (const Part* end = static_cast<const Part*>(parts) + firsts[which[i] + 1]; part < end; part++) {
                if (part->kind == RUN) move_run(*part, from, slots[i], to, to_slots[i]);
                else if (part->kind == KEY_LINES) move_keys(*part, from, slots[i], to, to_slots[i]);
                else move_values(*part, from, slots[i], to, to_slots[i]);
                const int bytes = (part->kind == VALUE_LINES ? 128 : 64) * part->size;
                from += bytes, to += bytes;
            }
        }
    });
}
