//! The first 4 KiB of an object file. All numbers are little-endian.
//!
//! A header is trusted only after [`Header::parse`]: any bytes whatever give either the header that
//! was written or a [`Damage`], never a panic.

use crc_fast::CrcAlgorithm::Crc64Nvme;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::ObjectInfo;
use crate::units::{PAGE_BYTES, align_up};
use crate::{Namespace, ObjectKey};

/// Bytes of a header, and where the payload begins.
pub const HEADER_BYTES: u64 = PAGE_BYTES;
/// The version that this crate writes and reads.
pub const FORMAT_VERSION: u32 = 1;
const MAGIC: [u8; 8] = *b"LakeObj\n";
const HAS_PARENT: u8 = 1;
const CHECKED_BYTES: usize = PAGE - 8;

const PAGE: usize = 4096;
const _: () = assert!(PAGE as u64 == HEADER_BYTES);

/// A page of memory, aligned as `O_DIRECT` wants it.
#[derive(Clone)]
#[repr(C, align(4096))]
pub struct Page(pub [u8; PAGE]);

impl Page {
    /// A page of zeros.
    pub fn zeroed() -> Box<Self> {
        Box::new(Self([0; PAGE]))
    }
}

/// Why a file is not the object it should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Damage {
    /// It ends before its header or its payload does.
    #[error("the file is shorter than its object")]
    Truncated,
    /// It goes on after its padded payload.
    #[error("the file is longer than its object")]
    Longer,
    /// It is no object file.
    #[error("the file does not begin as an object file does")]
    Magic,
    /// Another version of LakeCache wrote it.
    #[error("the file has another format version")]
    Version,
    /// The header is not what was written.
    #[error("the header's checksum is wrong")]
    HeaderChecksum,
    /// The header is intact, but what it says is impossible.
    #[error("the header contradicts itself")]
    Fields,
    /// It holds another object.
    #[error("the file holds another object")]
    Key,
    /// It belongs to another namespace.
    #[error("the file belongs to another namespace")]
    Namespace,
    /// The payload is not what was written.
    #[error("the payload's checksum is wrong")]
    Payload,
    /// What has its name cannot be opened: a link, or a file that we may not read.
    #[error("what has the object's name cannot be opened")]
    Unopenable,
}

impl Damage {
    /// Every kind, in the order of [`Damage::index`].
    pub const ALL: [Self; 10] = [
        Self::Truncated,
        Self::Longer,
        Self::Magic,
        Self::Version,
        Self::HeaderChecksum,
        Self::Fields,
        Self::Key,
        Self::Namespace,
        Self::Payload,
        Self::Unopenable,
    ];

    /// Its place in [`Damage::ALL`].
    pub fn index(self) -> usize {
        self as usize
    }
}

/// What an object file says about its object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Namespace of the object.
    pub namespace: Namespace,
    /// What it is.
    pub info: ObjectInfo,
    /// CRC-64/NVME of the payload.
    pub payload_checksum: u64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Raw {
    magic: [u8; 8],
    version: U32,
    kind: u8,
    flags: u8,
    ranks: U16,
    namespace: [u8; 32],
    key: [u8; 32],
    parent: [u8; 32],
    first_token: U32,
    last_token: U32,
    payload_bytes: U64,
    rank_bytes: U64,
    payload_checksum: U64,
    reserved: [u8; CHECKED_BYTES - 144],
    header_checksum: U64,
}

const _: () = assert!(size_of::<Raw>() as u64 == HEADER_BYTES);
const _: () = assert!(std::mem::offset_of!(Raw, payload_bytes) == 120);

/// Length of the file of an object with `payload_bytes`; `None`: no such object can exist.
pub fn file_bytes(payload_bytes: u64) -> Option<u64> {
    (payload_bytes <= i64::MAX as u64 / 2)
        .then(|| HEADER_BYTES + align_up(payload_bytes, PAGE_BYTES))
}

impl Header {
    /// The header's page.
    pub fn encode(&self) -> Box<Page> {
        let info = &self.info;
        let ranks = u64::from(info.ranks.max(1));
        let raw = Raw {
            magic: MAGIC,
            version: FORMAT_VERSION.into(),
            kind: info.kind,
            flags: if info.parent.is_some() { HAS_PARENT } else { 0 },
            ranks: info.ranks.into(),
            namespace: self.namespace.0,
            key: info.key.0,
            parent: info.parent.map_or([0; 32], |parent| parent.0),
            first_token: info.first_token.into(),
            last_token: info.last_token.into(),
            payload_bytes: info.payload_bytes.into(),
            rank_bytes: (info.payload_bytes / ranks).into(),
            payload_checksum: self.payload_checksum.into(),
            reserved: [0; CHECKED_BYTES - 144],
            header_checksum: 0.into(),
        };
        let mut page = Page::zeroed();
        page.0.copy_from_slice(raw.as_bytes());
        seal(&mut page.0);
        page
    }

    /// Reads a header; `page` is the beginning of the file.
    pub fn parse(page: &[u8]) -> Result<Self, Damage> {
        let Ok((raw, _)) = Raw::ref_from_prefix(page) else { return Err(Damage::Truncated) };
        if raw.magic != MAGIC {
            return Err(Damage::Magic);
        }
        if crc_fast::checksum(Crc64Nvme, &page[..CHECKED_BYTES]) != raw.header_checksum.get() {
            return Err(Damage::HeaderChecksum);
        }
        if raw.version.get() != FORMAT_VERSION {
            return Err(Damage::Version);
        }
        let (ranks, payload_bytes) = (raw.ranks.get(), raw.payload_bytes.get());
        let whole = raw.rank_bytes.get().checked_mul(u64::from(ranks)) == Some(payload_bytes);
        let spans = raw.first_token <= raw.last_token;
        let known = raw.flags & !HAS_PARENT == 0 && raw.reserved.iter().all(|&byte| byte == 0);
        if ranks == 0 || !whole || !spans || !known || file_bytes(payload_bytes).is_none() {
            return Err(Damage::Fields);
        }
        Ok(Self {
            namespace: Namespace(raw.namespace),
            info: ObjectInfo {
                key: ObjectKey(raw.key),
                parent: (raw.flags & HAS_PARENT != 0).then_some(ObjectKey(raw.parent)),
                kind: raw.kind,
                first_token: raw.first_token.get(),
                last_token: raw.last_token.get(),
                ranks,
                payload_bytes,
            },
            payload_checksum: raw.payload_checksum.get(),
        })
    }

    /// Compares with what the file's name and length say.
    pub fn check(&self, namespace: &Namespace, key: &ObjectKey, len: u64) -> Result<(), Damage> {
        if self.info.key != *key {
            return Err(Damage::Key);
        }
        if self.namespace != *namespace {
            return Err(Damage::Namespace);
        }
        match file_bytes(self.info.payload_bytes).map(|bytes| len.cmp(&bytes)) {
            Some(std::cmp::Ordering::Equal) => Ok(()),
            Some(std::cmp::Ordering::Greater) => Err(Damage::Longer),
            _ => Err(Damage::Truncated),
        }
    }
}

fn seal(page: &mut [u8]) {
    let checksum = crc_fast::checksum(Crc64Nvme, &page[..CHECKED_BYTES]);
    page[CHECKED_BYTES..].copy_from_slice(&checksum.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header() -> Header {
        Header {
            namespace: Namespace([1; 32]),
            info: ObjectInfo {
                key: ObjectKey([2; 32]),
                parent: Some(ObjectKey([3; 32])),
                kind: 1,
                first_token: 256,
                last_token: 512,
                ranks: 2,
                payload_bytes: 10_000,
            },
            payload_checksum: 0x0123_4567_89ab_cdef,
        }
    }

    #[test]
    fn a_header_round_trips() {
        for parent in [None, Some(ObjectKey([9; 32]))] {
            let mut header = header();
            header.info.parent = parent;
            assert_eq!(Header::parse(&header.encode().0), Ok(header));
        }
    }

    #[test]
    fn every_lie_has_its_verdict() {
        let lie = |at: usize, value: &[u8], sealed: bool| {
            let mut page = header().encode();
            page.0[at..at + value.len()].copy_from_slice(value);
            if sealed {
                seal(&mut page.0);
            }
            Header::parse(&page.0).unwrap_err()
        };
        assert_eq!(lie(0, b"notLake\n", true), Damage::Magic);
        assert_eq!(lie(8, &[2], true), Damage::Version);
        assert_eq!(lie(13, &[2], true), Damage::Fields);
        assert_eq!(lie(14, &[0, 0], true), Damage::Fields);
        assert_eq!(lie(112, &[0xff; 4], true), Damage::Fields);
        assert_eq!(lie(120, &[0xff; 8], true), Damage::Fields);
        assert_eq!(lie(128, &[0xff; 8], true), Damage::Fields);
        assert_eq!(lie(200, &[1], true), Damage::Fields);
        assert_eq!(lie(120, &[1], false), Damage::HeaderChecksum);
        assert_eq!(Header::parse(&header().encode().0[..4095]), Err(Damage::Truncated));
        assert_eq!(Header::parse(&[]), Err(Damage::Truncated));
        assert_eq!(Header::parse(&[0; 4096]), Err(Damage::Magic));
    }

    #[test]
    fn name_and_length_must_agree() {
        let header = header();
        let (namespace, key) = (header.namespace, header.info.key);
        let bytes = file_bytes(header.info.payload_bytes).unwrap();
        assert_eq!(bytes, 4096 + 12288);
        assert_eq!(header.check(&namespace, &key, bytes), Ok(()));
        assert_eq!(header.check(&namespace, &key, bytes - 1), Err(Damage::Truncated));
        assert_eq!(header.check(&namespace, &key, bytes + 1), Err(Damage::Longer));
        assert_eq!(header.check(&namespace, &ObjectKey([0; 32]), bytes), Err(Damage::Key));
        assert_eq!(header.check(&Namespace([0; 32]), &key, bytes), Err(Damage::Namespace));
        assert_eq!(file_bytes(u64::MAX), None);
    }

    proptest! {
        #[test]
        fn no_byte_flip_is_accepted(at in 0..4096_usize, flip in 1..=255_u8) {
            let mut page = header().encode();
            page.0[at] ^= flip;
            prop_assert!(Header::parse(&page.0).is_err());
        }

        #[test]
        fn any_bytes_parse_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200),
                                           length in 0..5000_usize, sealed: bool) {
            let mut page = header().encode().0.to_vec();
            page[12..12 + bytes.len()].copy_from_slice(&bytes);
            if sealed {
                seal(&mut page);
            }
            page.truncate(length);
            let _verdict = Header::parse(&page);
        }
    }
}
