//! One error type for the crate: what kind of failure, in which words, and its cause.

use std::io;

/// What a caller can do about a failure. A missing object is a miss and not an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A setting is wrong or impossible here: change it.
    Config,
    /// The pool was made by another format version or with another geometry.
    PoolIncompatible,
    /// Memory or disk space, or a limit, does not allow it: shrink, or skip the store.
    NoSpace,
    /// A system call failed; the source has the code.
    Io,
    /// A facility asked for by name is missing here.
    Unavailable,
    /// Used after `close`.
    Closed,
    /// Used in a child that was forked from the process that opened it.
    Forked,
    /// A deadline passed.
    Timeout,
}

/// A failure with the words for the user: the thing, the value, the limit and the remedy.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    kind: ErrorKind,
    message: String,
    #[source]
    source: Option<io::Error>,
}

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error in our own words.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), source: None }
    }

    /// A failed system call: `what` says what was attempted on which path. `ENOSPC`, `EDQUOT` and
    /// `ENOMEM` become [`ErrorKind::NoSpace`], anything else [`ErrorKind::Io`].
    pub fn io(what: impl AsRef<str>, source: impl Into<io::Error>) -> Self {
        let source = source.into();
        let kind = match source.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT | libc::ENOMEM) => ErrorKind::NoSpace,
            _ => ErrorKind::Io,
        };
        Self { kind, message: format!("{}: {source}", what.as_ref()), source: Some(source) }
    }

    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The system's error code, where a system call failed.
    pub fn errno(&self) -> Option<i32> {
        self.source.as_ref().and_then(io::Error::raw_os_error)
    }
}
