// Structures that Python fills in. One list of fields makes both the struct and a table of its fields, so the two cannot differ.
// Before the first use, kernels/runtime.py compares the table with the Python mirror of the struct.
//
//     QUIRE_STRUCT(Seal,                    struct Seal {
//         (int32_t, source)                     int32_t source;
//         (int32_t, chunk)         ->           int32_t chunk;
//     )                                     };  and fields_of(const Seal*)
#pragma once
#include <cstddef>
#include <cstdint>

namespace quire {

// The last entry of a table has no name; its offset is the size of the struct.
struct Field {
    const char* name;
    int64_t offset, size;
};

}  // namespace quire

#define QUIRE_STRUCT(name, fields)                                                                             \
    struct name {                                                                                              \
        QUIRE_ENDED(QUIRE_MEMBER_A fields)                                                                     \
    };                                                                                                         \
    inline const Field* fields_of(const name*) {                                                               \
        using Self = name;                                                                                     \
        static constexpr Field table[] = {QUIRE_ENDED(QUIRE_ENTRY_A fields){nullptr, sizeof(Self), 0}};        \
        return table;                                                                                          \
    }

// Exports the table of a struct of namespace quire. To be used once, in one source.
#define QUIRE_EXPORT_FIELDS(name) \
    QUIRE_API const quire::Field* quire_fields_##name() { return quire::fields_of(static_cast<const quire::name*>(nullptr)); }

// Each macro of a pair (_A, _B) expands one element of a list (a, b)(c, d), followed by the name of the other macro, which expands the next element.
// QUIRE_ENDED appends _END to the last name, which makes it the name of an empty macro.
#define QUIRE_MEMBER_A(type, field) type field; QUIRE_MEMBER_B
#define QUIRE_MEMBER_B(type, field) type field; QUIRE_MEMBER_A
#define QUIRE_MEMBER_A_END
#define QUIRE_MEMBER_B_END
#define QUIRE_ENTRY_A(type, field) {#field, offsetof(Self, field), sizeof(Self::field)}, QUIRE_ENTRY_B
#define QUIRE_ENTRY_B(type, field) {#field, offsetof(Self, field), sizeof(Self::field)}, QUIRE_ENTRY_A
#define QUIRE_ENTRY_A_END
#define QUIRE_ENTRY_B_END
#define QUIRE_ENDED(...) QUIRE_ENDED_(__VA_ARGS__)
#define QUIRE_ENDED_(...) __VA_ARGS__##_END
