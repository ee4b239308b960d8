//! The list of stored objects beside the files: it spares the next start from reading every header
//! and keeps the order of use. Losing it loses the order only: the directory is the truth.

use std::collections::HashMap;
use std::path::Path;

use crc_fast::CrcAlgorithm::Crc64Nvme;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{DiskStore, LOCK_WAIT, ObjectInfo};
use crate::{Error, ErrorKind, Namespace, ObjectKey, Result, sys};

const MAGIC: [u8; 8] = *b"LakeSnp1";
const NAME: &str = "objects.snapshot";
/// A file larger than this is no list of ours: four million objects.
const BYTES_MAX: u64 = 1 << 30;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct Line {
    namespace: [u8; 32],
    key: [u8; 32],
    parent: [u8; 32],
    first_token: U32,
    last_token: U32,
    payload_bytes: U64,
    ranks: U16,
    kind: u8,
    has_parent: u8,
    pad: [u8; 4],
}

/// What the list says about an object, and its place from the least to the most recent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Known {
    pub(super) namespace: Namespace,
    pub(super) info: ObjectInfo,
    pub(super) order: u64,
}

impl DiskStore {
    /// Saves the list of stored objects.
    pub fn snapshot(&self) -> Result<()> {
        self.check_in_place()?;
        let records =
            self.write_lock(LOCK_WAIT.into(), |writer| self.table.oldest_first(writer))?;
        let Some(records) = records else {
            return Err(Error::new(ErrorKind::Timeout, "the writer lock is held"));
        };
        let mut bytes = Vec::with_capacity(16 + records.len() * size_of::<Line>());
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&(records.len() as u64).to_le_bytes());
        let mut names = HashMap::new();
        for record in &records {
            let namespace = *names
                .entry(record.namespace)
                .or_insert_with(|| self.pool.namespace(record.namespace));
            let Some(namespace) = namespace else { continue };
            let info = &record.info;
            let line = Line {
                namespace: namespace.0,
                key: info.key.0,
                parent: info.parent.map_or([0; 32], |parent| parent.0),
                first_token: info.first_token.into(),
                last_token: info.last_token.into(),
                payload_bytes: info.payload_bytes.into(),
                ranks: info.ranks.into(),
                kind: info.kind,
                has_parent: u8::from(info.parent.is_some()),
                pad: [0; 4],
            };
            bytes.extend_from_slice(line.as_bytes());
        }
        let checksum = crc_fast::checksum(Crc64Nvme, &bytes);
        bytes.extend_from_slice(&checksum.to_le_bytes());
        sys::object::replace(&self.dir.join(NAME), &bytes)
    }
}

/// Reads the list; empty where there is none, or it is not whole.
pub(super) fn read(dir: &Path) -> HashMap<ObjectKey, Known> {
    match sys::object::read_whole(&dir.join(NAME), BYTES_MAX) {
        Ok(Some(bytes)) => parse(&bytes).unwrap_or_else(|| {
            log::warn!("the list of stored objects is damaged: every header is read instead");
            HashMap::new()
        }),
        Ok(None) => HashMap::new(),
        Err(error) => {
            log::warn!("the list of stored objects is not readable: {error}");
            HashMap::new()
        }
    }
}

fn parse(bytes: &[u8]) -> Option<HashMap<ObjectKey, Known>> {
    let (checked, checksum) = bytes.split_last_chunk::<8>()?;
    if crc_fast::checksum(Crc64Nvme, checked) != u64::from_le_bytes(*checksum) {
        return None;
    }
    let lines = checked.strip_prefix(&MAGIC)?.get(8..)?;
    let lines = <[Line]>::ref_from_bytes(lines).ok()?;
    let known = |(order, line): (usize, &Line)| {
        let key = ObjectKey(line.key);
        let info = ObjectInfo {
            key,
            parent: (line.has_parent == 1).then_some(ObjectKey(line.parent)),
            kind: line.kind,
            first_token: line.first_token.get(),
            last_token: line.last_token.get(),
            ranks: line.ranks.get(),
            payload_bytes: line.payload_bytes.get(),
        };
        (key, Known { namespace: Namespace(line.namespace), info, order: order as u64 })
    };
    Some(lines.iter().enumerate().map(known).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_no_list_are_refused() {
        let mut list = MAGIC.to_vec();
        list.extend_from_slice(&[0; 8 + size_of::<Line>()]);
        let checksum = crc_fast::checksum(Crc64Nvme, &list);
        list.extend_from_slice(&checksum.to_le_bytes());
        assert_eq!(parse(&list).unwrap().len(), 1);
        for at in 0..list.len() {
            let mut damaged = list.clone();
            damaged[at] ^= 0x40;
            assert!(parse(&damaged).is_none(), "byte {at}");
            assert!(parse(&list[..at]).is_none(), "length {at}");
        }
    }
}
