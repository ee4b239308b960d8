//! The pool file's layout: header, members, namespaces, tables, and where the data area begins.
//!
//! ```text
//! header 4 KiB | members 128 x 64 B | namespaces 1024 x 40 B | pieces | extent bitmap
//! | L1 entries | L1 index | L2 records | L2 index | (2 MiB boundary) data pages
//! ```
//! All numbers are native-endian: a pool never leaves its host. Every field that two processes
//! touch is an atomic; the geometry is written once, before the header is published.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use crate::units::{PAGE_BYTES, align_up};
use crate::{Error, ErrorKind, Result};

/// Number of members (openings of the pool, see [`super::Pool::open`]) that can live at a time.
pub const MEMBERS_MAX: usize = 128;
/// Number of namespaces a pool remembers.
pub const NAMESPACES_MAX: usize = 1024;
/// Bytes of one L1 entry.
pub const L1_ENTRY_BYTES: u64 = 256;
/// Bytes of one L2 record.
pub const L2_RECORD_BYTES: u64 = 128;
/// No entry: the end of a list, or an empty link.
pub const NONE: u32 = u32::MAX;
/// The least data area with which a pool is of any use.
pub const DATA_BYTES_MIN: u64 = 4 << 20;
/// The largest piece that is reserved in one step.
pub const PIECE_BYTES_MAX: u64 = 256 << 20;

pub(super) const MAGIC: u64 = u64::from_ne_bytes(*b"LakePool");
pub(super) const FORMAT_VERSION: u32 = 3;
pub(super) const CACHE_DIR_MAX: usize = 2048;

const HUGE_PAGE_BYTES: u64 = 2 << 20;
const PIECE_BYTES_SMALL: u64 = 16 << 20;
const HEADER_BYTES: u64 = 4096;
const KIB: u64 = 1 << 10;

/// The two tables whose roots the header holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Table {
    /// Objects in memory.
    L1,
    /// Objects on disk.
    L2,
}

/// A part of the metadata.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Region {
    /// `l1_entries` records of [`L1_ENTRY_BYTES`].
    L1Entries,
    /// Slots of the L1 hash index, see [`super::index`].
    L1Index,
    /// One bit for each data page, in whole 64-bit words.
    ExtentBitmap,
    /// One 64-bit word for each piece; bit 0 says that the piece is reserved.
    Pieces,
    /// `l2_records` records of [`L2_RECORD_BYTES`].
    L2Records,
    /// Slots of the L2 hash index.
    L2Index,
}

/// What a table keeps in the header: list ends, counts and totals. Changed under the writer lock.
#[repr(C, align(64))]
pub struct TableRoot {
    /// The most recently used entry.
    pub head: AtomicU32,
    /// The least recently used entry.
    pub tail: AtomicU32,
    /// Entries in use.
    pub count: AtomicU32,
    /// First entry of the free list.
    pub free_head: AtomicU32,
    /// Bytes in use.
    pub bytes: AtomicU64,
    /// For the table's own use; zero in a new pool.
    pub spare: [AtomicU64; 8],
    _pad: [u64; 5],
}

/// One member's record. Only the kernel lock proves life; the process's number and start are used to
/// see it end, where a GPU copies for it.
#[repr(C, align(64))]
pub(super) struct MemberRecord {
    /// [`MEMBER_FREE`] or [`MEMBER_USED`]: used ones that no process has locked are dead.
    pub(super) state: AtomicU32,
    pub(super) pid: AtomicU32,
    pub(super) start_time: AtomicU64,
    /// `u64::MAX` = no limit.
    pub(super) disk_capacity_bytes: AtomicU64,
    /// The pool's clock when it joined: no two members have the same.
    pub(super) joined: AtomicU64,
    /// Not 0, for good: a GPU may copy into the pool for it, see `death`.
    pub(super) gpu_copies: AtomicU64,
    _pad: [u64; 3],
}

pub(super) const MEMBER_FREE: u32 = 0;
pub(super) const MEMBER_USED: u32 = 1;

/// One namespace; the digest is immutable once `Header::namespaces` counts it.
#[repr(C)]
pub(super) struct NamespaceRecord {
    pub(super) digest: [AtomicU64; 4],
    /// Not 0, for good: its objects must never reach the disk.
    pub(super) memory_only: AtomicU64,
}

/// Sizes and places of everything in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Geometry {
    /// Bytes of the whole file.
    pub file_bytes: u64,
    /// Start of the data area, a multiple of 2 MiB.
    pub data_offset: u64,
    /// Pages of the data area.
    pub data_pages: u64,
    /// Pages of a piece; the last piece may be shorter.
    pub piece_pages: u64,
    /// Number of pieces.
    pub pieces: u32,
    /// Number of L1 entries.
    pub l1_entries: u32,
    /// Number of L2 records.
    pub l2_records: u32,
    /// Slots of the L1 index, a power of two at least twice the entries.
    pub l1_slots: u32,
    /// Slots of the L2 index.
    pub l2_slots: u32,
    _pad: u32,
}

/// The first page of the file.
#[repr(C, align(4096))]
pub(super) struct Header {
    /// [`MAGIC`] once everything else is in place.
    pub(super) magic: AtomicU64,
    pub(super) version: AtomicU32,
    _pad0: u32,
    pub(super) pool_id: [AtomicU8; 16],
    /// Random, new for each created file: tells two pools of one id apart.
    pub(super) incarnation: AtomicU64,
    pub(super) mount_namespace: AtomicU64,
    pub(super) geometry: Geometry,
    pub(super) namespaces: AtomicU32,
    _pad1: u32,
    pub(super) recoveries: AtomicU64,
    pub(super) reaped: AtomicU64,
    /// Odd while a writer is at work, or after one died at work.
    pub(super) epoch: Line,
    pub(super) clock: Line,
    pub(super) roots: [TableRoot; 2],
    /// Length and bytes of the absolute path of the cache directory; length 0: memory only.
    pub(super) cache_dir_len: AtomicU32,
    pub(super) cache_dir: [AtomicU8; CACHE_DIR_MAX],
}

/// A counter with a cache line of its own.
#[repr(C, align(64))]
pub(super) struct Line(pub(super) AtomicU64);

const _: () = assert!(size_of::<Header>() as u64 == HEADER_BYTES);
const _: () = assert!(size_of::<TableRoot>() == 128);
const _: () = assert!(size_of::<MemberRecord>() == 64);
const _: () = assert!(size_of::<NamespaceRecord>() == 40);
const _: () = assert!(std::mem::offset_of!(Header, geometry) == 48);

impl TableRoot {
    /// An empty table.
    #[cfg(test)]
    pub(super) fn new() -> Self {
        // SAFETY: all fields are atomics or integers, for which zero is a valid value.
        let root: Self = unsafe { std::mem::zeroed() };
        root.clear();
        root
    }

    pub(super) fn clear(&self) {
        for link in [&self.head, &self.tail, &self.free_head] {
            link.store(NONE, Ordering::Relaxed);
        }
        self.count.store(0, Ordering::Relaxed);
        self.bytes.store(0, Ordering::Relaxed);
    }
}

/// What decides the geometry.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    /// Bytes of the whole file; 0: `transit_bytes` of data besides the metadata.
    pub(super) cpu_bytes: u64,
    pub(super) transit_bytes: u64,
    pub(super) l1_entries: Option<u32>,
    pub(super) l2_records: Option<u32>,
    pub(super) disk_capacity_bytes: Option<u64>,
    pub(super) disk: bool,
}

impl Geometry {
    /// The geometry for `sizes`; an error if the metadata leaves no useful data area.
    pub(super) fn new(sizes: &Sizes) -> Result<Self> {
        let l1_entries = sizes.l1_entries.unwrap_or_else(|| default_l1_entries(sizes)).max(1);
        let l2_records = match (sizes.disk, sizes.l2_records) {
            (false, _) => 0,
            (true, Some(records)) => records.max(1),
            (true, None) => default_l2_records(sizes),
        };
        let mut geometry = Self {
            file_bytes: sizes.cpu_bytes,
            data_offset: 0,
            data_pages: 0,
            piece_pages: 0,
            pieces: 0,
            l1_entries,
            l2_records,
            l1_slots: slots_for(l1_entries),
            l2_slots: slots_for(l2_records),
            _pad: 0,
        };
        // The bitmap and the piece words are sized for the whole file: a few bytes too many.
        let data_guess = if sizes.cpu_bytes == 0 { sizes.transit_bytes } else { sizes.cpu_bytes };
        geometry.data_pages = data_guess / PAGE_BYTES;
        geometry.set_pieces();
        geometry.data_offset = align_up(geometry.metadata_end(), HUGE_PAGE_BYTES);
        if sizes.cpu_bytes == 0 {
            geometry.file_bytes = geometry.data_offset + geometry.data_pages * PAGE_BYTES;
        }
        let data_bytes = geometry.file_bytes.saturating_sub(geometry.data_offset);
        if data_bytes < DATA_BYTES_MIN {
            let least = geometry.data_offset + DATA_BYTES_MIN;
            return Err(Error::new(
                ErrorKind::Config,
                format!(
                    "cpu_bytes = {} is too small: the pool's metadata takes {} bytes and at least \
                     {DATA_BYTES_MIN} bytes of data are needed; set cpu_bytes to {least} or more",
                    sizes.cpu_bytes, geometry.data_offset
                ),
            ));
        }
        geometry.data_pages = data_bytes / PAGE_BYTES;
        geometry.file_bytes = geometry.data_offset + geometry.data_pages * PAGE_BYTES;
        geometry.set_pieces();
        Ok(geometry)
    }

    /// A few pieces in a small pool, so that the first is ready soon; 256 MiB each in a large one.
    fn set_pieces(&mut self) {
        let data_bytes = self.data_pages * PAGE_BYTES;
        let piece_bytes = if data_bytes <= 2 * PIECE_BYTES_SMALL {
            data_bytes
        } else {
            align_up(data_bytes / 8, HUGE_PAGE_BYTES).clamp(PIECE_BYTES_SMALL, PIECE_BYTES_MAX)
        };
        self.piece_pages = (piece_bytes / PAGE_BYTES).max(1);
        self.pieces = u32::try_from(self.data_pages.div_ceil(self.piece_pages)).unwrap_or(u32::MAX);
    }

    /// The byte offset and length of a region.
    pub fn region(&self, region: Region) -> (u64, u64) {
        let mut offset = TABLES_OFFSET;
        for (this, bytes) in self.regions() {
            if this == region {
                return (offset, bytes);
            }
            offset += align_up(bytes, PAGE_BYTES);
        }
        unreachable!("every region is listed")
    }

    fn regions(&self) -> [(Region, u64); 6] {
        [
            (Region::Pieces, u64::from(self.pieces) * 8),
            (Region::ExtentBitmap, self.data_pages.div_ceil(64) * 8),
            (Region::L1Entries, u64::from(self.l1_entries) * L1_ENTRY_BYTES),
            (Region::L1Index, u64::from(self.l1_slots) * 8),
            (Region::L2Records, u64::from(self.l2_records) * L2_RECORD_BYTES),
            (Region::L2Index, u64::from(self.l2_slots) * 8),
        ]
    }

    fn metadata_end(&self) -> u64 {
        let sum = |end, (_, bytes): (Region, u64)| end + align_up(bytes, PAGE_BYTES);
        self.regions().into_iter().fold(TABLES_OFFSET, sum)
    }

    /// The byte range of `piece` in the file.
    pub(super) fn piece(&self, piece: u32) -> (u64, u64) {
        let first = u64::from(piece) * self.piece_pages;
        let pages = self.piece_pages.min(self.data_pages.saturating_sub(first));
        (self.data_offset + first * PAGE_BYTES, pages * PAGE_BYTES)
    }

    /// True if every region and the data area lie within a file of `file_bytes`, without overlap.
    pub(super) fn is_sound(&self, file_bytes: u64) -> bool {
        let pieces = self.data_pages.checked_div(self.piece_pages);
        self.file_bytes == file_bytes
            && self.data_offset.is_multiple_of(HUGE_PAGE_BYTES)
            && self.data_offset < file_bytes
            && self.data_pages == (file_bytes - self.data_offset) / PAGE_BYTES
            && pieces.is_some()
            && u64::from(self.pieces) == self.data_pages.div_ceil(self.piece_pages)
            && self.l1_slots == slots_for(self.l1_entries)
            && self.l2_slots == slots_for(self.l2_records)
            && self.metadata_end() <= self.data_offset
    }
}

pub(super) const MEMBERS_OFFSET: u64 = HEADER_BYTES;
pub(super) const NAMESPACES_OFFSET: u64 =
    MEMBERS_OFFSET + (MEMBERS_MAX * size_of::<MemberRecord>()) as u64;
const TABLES_OFFSET: u64 = align_up(
    NAMESPACES_OFFSET + (NAMESPACES_MAX * size_of::<NamespaceRecord>()) as u64,
    PAGE_BYTES,
);

/// Index slots for `entries`: at most half full, none for none.
fn slots_for(entries: u32) -> u32 {
    if entries == 0 {
        0
    } else {
        entries.saturating_mul(2).checked_next_power_of_two().unwrap_or(1 << 31)
    }
}

/// One entry for each 128 KiB: objects are megabytes, but tiny models exist.
fn default_l1_entries(sizes: &Sizes) -> u32 {
    let data = if sizes.cpu_bytes == 0 { sizes.transit_bytes } else { sizes.cpu_bytes };
    u32::try_from((data / (128 * KIB)).clamp(256, 256 * KIB)).unwrap_or(256)
}

/// 128 Ki records, more for a large disk, and never more than an eighth of the pool's bytes.
fn default_l2_records(sizes: &Sizes) -> u32 {
    let wanted = sizes.disk_capacity_bytes.unwrap_or(0) / (KIB * KIB);
    let most = if sizes.cpu_bytes == 0 { u64::MAX } else { (sizes.cpu_bytes / KIB).max(4 * KIB) };
    u32::try_from(wanted.clamp(128 * KIB, 4 * KIB * KIB).min(most)).unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(cpu_bytes: u64) -> Sizes {
        Sizes {
            cpu_bytes,
            transit_bytes: 64 << 20,
            l1_entries: None,
            l2_records: None,
            disk_capacity_bytes: None,
            disk: true,
        }
    }

    #[test]
    fn regions_do_not_overlap_and_the_file_stays_within_cpu_bytes() {
        for cpu_bytes in [8 << 20, (64 << 20) + 12345, 1 << 30, 1 << 40, 0] {
            let geometry = Geometry::new(&sizes(cpu_bytes)).unwrap();
            assert!(cpu_bytes == 0 || geometry.file_bytes <= cpu_bytes);
            assert!(geometry.is_sound(geometry.file_bytes), "{geometry:?}");
            let mut end = TABLES_OFFSET;
            for (region, bytes) in geometry.regions() {
                assert_eq!(geometry.region(region), (end, bytes));
                end += align_up(bytes, PAGE_BYTES);
            }
            assert!(end <= geometry.data_offset);
            let pieces: u64 = (0..geometry.pieces).map(|p| geometry.piece(p).1).sum();
            assert_eq!(pieces, geometry.data_pages * PAGE_BYTES);
        }
    }

    #[test]
    fn a_pool_without_room_for_data_is_refused_with_the_least_size() {
        let error = Geometry::new(&sizes(3 << 20)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        let least: u64 =
            error.to_string().split(' ').filter_map(|w| w.parse().ok()).next_back().unwrap();
        assert!(Geometry::new(&sizes(least)).is_ok(), "{error}");
    }

    #[test]
    fn disk_capacity_sizes_the_disk_table_within_an_eighth_of_the_pool() {
        let mut large = sizes(64 << 30);
        large.disk_capacity_bytes = Some(1 << 40);
        assert_eq!(Geometry::new(&large).unwrap().l2_records, 1 << 20);
        large.cpu_bytes = 256 << 20;
        assert_eq!(Geometry::new(&large).unwrap().l2_records, 1 << 18);
        large.disk = false;
        assert_eq!(Geometry::new(&large).unwrap().l2_records, 0);
    }
}
