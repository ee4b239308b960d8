//! Page arithmetic shared by the arena and the object files.

/// The unit in which the arena hands out memory and object files are padded: what `O_DIRECT` wants
/// on every common disk, and the size of a small page.
pub const PAGE_BYTES: u64 = 4096;

/// Rounds `bytes` up to a multiple of `unit`, which is a power of two.
pub const fn align_up(bytes: u64, unit: u64) -> u64 {
    assert!(unit.is_power_of_two());
    bytes.checked_add(unit - 1).expect("a size near 2^64 bytes") & !(unit - 1)
}

/// The number of whole pages that hold `bytes`.
pub const fn pages_for(bytes: u64) -> u64 {
    align_up(bytes, PAGE_BYTES) / PAGE_BYTES
}
