//! The identity of an object: a namespace and a key, both BLAKE3 digests.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Error, ErrorKind, Result};

/// The key of one object within the whole store: 32 bytes that already cover its namespace.
///
/// A key is the BLAKE3 digest of (namespace, kind, block hash), see [`ObjectKey::derive`], so two
/// namespaces never share one; its bytes are uniformly distributed and serve as their own hash.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectKey(pub [u8; 32]);

/// The digest of everything besides the tokens that decides an object's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Namespace(pub [u8; 32]);

impl ObjectKey {
    /// The key of the object of `kind` whose last token block has `block_hash` in `namespace`.
    pub fn derive(namespace: &Namespace, kind: u8, block_hash: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("lakecache object key v1");
        hasher.update(&namespace.0);
        hasher.update(&[kind]);
        hasher.update(block_hash);
        Self(*hasher.finalize().as_bytes())
    }

    /// The first eight bytes, for hash tables.
    pub fn hash64(&self) -> u64 {
        let mut head = [0; 8];
        head.copy_from_slice(&self.0[..8]);
        u64::from_le_bytes(head)
    }

    /// The key as the four words that shared tables keep.
    pub(crate) fn words(&self) -> [u64; 4] {
        words(&self.0)
    }

    /// Writes the key into a shared table; whoever reads meanwhile may see half of it.
    pub(crate) fn store(&self, words: &[AtomicU64; 4]) {
        store(&self.0, words);
    }

    /// Reads what [`ObjectKey::store`] wrote.
    pub(crate) fn load(words: &[AtomicU64; 4]) -> Self {
        Self(load(words))
    }

    /// 64 lower-case hexadecimal digits.
    pub fn hex(&self) -> String {
        hex(&self.0)
    }

    /// Reads what [`ObjectKey::hex`] writes.
    pub fn from_hex(text: &str) -> Result<Self> {
        unhex(text).map(Self)
    }
}

impl Namespace {
    /// As [`ObjectKey::store`].
    pub(crate) fn store(&self, words: &[AtomicU64; 4]) {
        store(&self.0, words);
    }

    /// Reads what [`Namespace::store`] wrote.
    pub(crate) fn load(words: &[AtomicU64; 4]) -> Self {
        Self(load(words))
    }

    /// 64 lower-case hexadecimal digits.
    pub fn hex(&self) -> String {
        hex(&self.0)
    }

    /// Reads what [`Namespace::hex`] writes.
    pub fn from_hex(text: &str) -> Result<Self> {
        unhex(text).map(Self)
    }
}

fn words(digest: &[u8; 32]) -> [u64; 4] {
    let mut words = [0; 4];
    for (word, bytes) in words.iter_mut().zip(digest.as_chunks().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    words
}

fn store(digest: &[u8; 32], to: &[AtomicU64; 4]) {
    for (word, value) in to.iter().zip(words(digest)) {
        word.store(value, Ordering::Relaxed);
    }
}

fn load(words: &[AtomicU64; 4]) -> [u8; 32] {
    let mut digest = [0; 32];
    for (bytes, word) in digest.as_chunks_mut().0.iter_mut().zip(words) {
        *bytes = word.load(Ordering::Relaxed).to_le_bytes();
    }
    digest
}

fn hex(bytes: &[u8; 32]) -> String {
    use fmt::Write;
    bytes.iter().fold(String::with_capacity(64), |mut text, byte| {
        write!(text, "{byte:02x}").expect("writing to a String");
        text
    })
}

fn unhex(text: &str) -> Result<[u8; 32]> {
    let bad = || Error::new(ErrorKind::Config, format!("{text:?} is not 64 hexadecimal digits"));
    let digits = text.as_bytes();
    if digits.len() != 64 {
        return Err(bad());
    }
    let mut bytes = [0; 32];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        let digit = |c: u8| match c {
            b'0'..=b'9' => Some(c - b'0'),
            b'a'..=b'f' => Some(c - b'a' + 10),
            _ => None,
        };
        *byte = digit(pair[0]).zip(digit(pair[1])).map(|(h, l)| h << 4 | l).ok_or_else(bad)?;
    }
    Ok(bytes)
}

impl fmt::Debug for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ObjectKey({}…)", &self.hex()[..12])
    }
}

impl fmt::Debug for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Namespace({}…)", &self.hex()[..12])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_round_trips_and_refuses_other_text() {
        let key = ObjectKey::derive(&Namespace([7; 32]), 0, b"block");
        assert_eq!(ObjectKey::from_hex(&key.hex()).unwrap(), key);
        for bad in ["", "zz", &"G".repeat(64), &key.hex().to_uppercase()] {
            assert_eq!(ObjectKey::from_hex(bad).unwrap_err().kind(), ErrorKind::Config);
        }
    }

    #[test]
    fn namespace_kind_and_hash_each_change_the_key() {
        let key = |n, kind, h: &[u8]| ObjectKey::derive(&Namespace([n; 32]), kind, h);
        let base = key(1, 0, b"h");
        for other in [key(2, 0, b"h"), key(1, 1, b"h"), key(1, 0, b"i")] {
            assert_ne!(base, other);
        }
    }
}
