//! Allocates runs of pages from a bitmap, one bit a page, 1 = in use.
//!
//! Only the holder of the writer lock calls this; the bitmap is derived from the entries and made
//! anew when a writer died. Pages are divided into pieces; an extent lies within one piece, and
//! only in one whose memory is reserved. For each piece a hint keeps an upper bound of its longest
//! free run, so that full pieces are not searched again and again. Hints are each process's own: a
//! shared count of frees tells when another process's frees made them too low.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::entry::{EXTENTS_MAX, Extent};

const WORD_BITS: u64 = 64;

/// Upper bounds of the longest free run, one for each piece.
#[derive(Debug)]
pub struct Hints {
    longest: Box<[AtomicU32]>,
    /// The shared count of frees when the hints were last right.
    seen: AtomicU64,
}

/// A view of the bitmap.
#[derive(Clone, Copy)]
pub struct Extents<'a> {
    words: &'a [AtomicU64],
    pages: u64,
    piece_pages: u64,
    hints: &'a Hints,
    /// Counts frees by all processes.
    frees: &'a AtomicU64,
}

impl Hints {
    /// Hints for `pieces` pieces, of which nothing is known.
    pub fn new(pieces: u32) -> Self {
        Self {
            longest: (0..pieces).map(|_| AtomicU32::new(u32::MAX)).collect(),
            seen: AtomicU64::new(0),
        }
    }

    fn forget(&self) {
        for hint in &self.longest {
            hint.store(u32::MAX, Ordering::Relaxed);
        }
    }
}

impl<'a> Extents<'a> {
    /// The allocator over `words`, which cover `pages` pages in pieces of `piece_pages`.
    pub fn new(
        words: &'a [AtomicU64],
        pages: u64,
        piece_pages: u64,
        hints: &'a Hints,
        frees: &'a AtomicU64,
    ) -> Self {
        assert!(words.len() as u64 * WORD_BITS >= pages && piece_pages > 0);
        assert_eq!(hints.longest.len() as u64, pages.div_ceil(piece_pages));
        Self { words, pages, piece_pages, hints, frees }
    }

    /// Takes `pages` pages from pieces that are `reserved`: in one run if there is one, else in as
    /// few as possible, at most [`EXTENTS_MAX`]. `None`: there are none, and nothing is taken.
    pub fn allocate(&self, pages: u64, reserved: impl Fn(u32) -> bool) -> Option<Vec<Extent>> {
        if pages == 0 {
            return None;
        }
        self.refresh_hints();
        let mut longest: Vec<Extent> = Vec::with_capacity(EXTENTS_MAX + 1);
        if pages <= self.piece_pages {
            for piece in 0..self.pieces() {
                if u64::from(self.hint(piece)) < pages || !reserved(piece) {
                    continue;
                }
                if let Some(first) = self.first_fit(piece, pages) {
                    let extent = Extent { first, pages };
                    self.mark(extent, true);
                    return Some(vec![extent]);
                }
            }
        }
        for piece in (0..self.pieces()).filter(|&piece| reserved(piece)) {
            if self.hint(piece) > 0 {
                self.each_run(piece, |run| keep_longest(&mut longest, run));
            }
        }
        let mut left = pages;
        let mut taken = Vec::with_capacity(EXTENTS_MAX);
        for run in longest {
            let part = Extent { first: run.first, pages: run.pages.min(left) };
            left -= part.pages;
            taken.push(part);
            if left == 0 {
                for &extent in &taken {
                    self.mark(extent, true);
                }
                return Some(taken);
            }
        }
        None
    }

    /// Gives an extent back.
    pub fn free(&self, extent: Extent) {
        self.refresh_hints();
        self.mark(extent, false);
        if let Some(hint) = self.piece_of(extent).and_then(|p| self.hints.longest.get(p)) {
            hint.store(u32::MAX, Ordering::Relaxed);
        }
        let count = self.frees.load(Ordering::Relaxed) + 1;
        self.frees.store(count, Ordering::Relaxed);
        self.hints.seen.store(count, Ordering::Relaxed);
    }

    /// Takes an extent that a rebuild found in an entry. False, and nothing taken: it is not a run
    /// of free pages within one piece.
    pub fn claim(&self, extent: Extent) -> bool {
        if self.piece_of(extent).is_none() || !(extent.first..extent.end()).all(|p| !self.bit(p)) {
            return false;
        }
        self.mark(extent, true);
        true
    }

    /// Frees everything, for a rebuild.
    pub fn clear(&self) {
        self.words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        self.hints.forget();
        // Other processes' hints are void as well.
        let count = self.frees.load(Ordering::Relaxed) + 1;
        self.frees.store(count, Ordering::Relaxed);
        self.hints.seen.store(count, Ordering::Relaxed);
    }

    /// Pages in use.
    pub fn used(&self) -> u64 {
        self.words.iter().map(|w| u64::from(w.load(Ordering::Relaxed).count_ones())).sum()
    }

    /// Whether `page` is in use.
    pub fn is_used(&self, page: u64) -> bool {
        page < self.pages && self.bit(page)
    }

    /// The piece in which an extent lies, `None` if it crosses a boundary or leaves the data area.
    pub fn piece_of(&self, extent: Extent) -> Option<usize> {
        let end = extent.first.checked_add(extent.pages)?;
        let piece = extent.first / self.piece_pages;
        (extent.pages > 0 && end <= self.pages && (end - 1) / self.piece_pages == piece)
            .then(|| usize::try_from(piece).ok())
            .flatten()
    }

    fn pieces(&self) -> u32 {
        u32::try_from(self.hints.longest.len()).unwrap_or(u32::MAX)
    }

    fn hint(&self, piece: u32) -> u32 {
        self.hints.longest[piece as usize].load(Ordering::Relaxed)
    }

    fn refresh_hints(&self) {
        let count = self.frees.load(Ordering::Relaxed);
        if self.hints.seen.swap(count, Ordering::Relaxed) != count {
            self.hints.forget();
        }
    }

    fn piece_range(&self, piece: u32) -> (u64, u64) {
        let first = u64::from(piece) * self.piece_pages;
        (first, (first + self.piece_pages).min(self.pages))
    }

    /// The first free run of at least `pages`; if there is none, the hint becomes exact.
    fn first_fit(&self, piece: u32, pages: u64) -> Option<u64> {
        let (mut at, end) = self.piece_range(piece);
        let mut longest = 0;
        while let Some(run) = self.next_run(at, end) {
            if run.pages >= pages {
                return Some(run.first);
            }
            longest = longest.max(run.pages);
            at = run.end();
        }
        let exact = u32::try_from(longest).unwrap_or(u32::MAX);
        self.hints.longest[piece as usize].store(exact, Ordering::Relaxed);
        None
    }

    fn each_run(&self, piece: u32, mut visit: impl FnMut(Extent)) {
        let (mut at, end) = self.piece_range(piece);
        while let Some(run) = self.next_run(at, end) {
            at = run.end();
            visit(run);
        }
    }

    /// The next run of free pages in `from..end`.
    fn next_run(&self, from: u64, end: u64) -> Option<Extent> {
        let first = self.next_with(from, end, false)?;
        let last = self.next_with(first, end, true).unwrap_or(end);
        Some(Extent { first, pages: last - first })
    }

    /// The next page in `from..end` whose bit is `used`.
    fn next_with(&self, from: u64, end: u64, used: bool) -> Option<u64> {
        let mut at = from;
        while at < end {
            let word = self.word(at).load(Ordering::Relaxed);
            let wanted = (if used { word } else { !word }) >> (at % WORD_BITS);
            if wanted != 0 {
                let found = at + u64::from(wanted.trailing_zeros());
                return (found < end).then_some(found);
            }
            at = (at / WORD_BITS + 1) * WORD_BITS;
        }
        None
    }

    fn bit(&self, page: u64) -> bool {
        self.word(page).load(Ordering::Relaxed) >> (page % WORD_BITS) & 1 == 1
    }

    fn word(&self, page: u64) -> &AtomicU64 {
        &self.words[usize::try_from(page / WORD_BITS).unwrap_or(usize::MAX)]
    }

    fn mark(&self, extent: Extent, used: bool) {
        let mut at = extent.first;
        while at < extent.end() {
            let shift = at % WORD_BITS;
            let count = (WORD_BITS - shift).min(extent.end() - at);
            let mask = (u64::MAX >> (WORD_BITS - count)) << shift;
            let place = self.word(at);
            let word = place.load(Ordering::Relaxed);
            // Not fatal to other processes: a writer that panics here leaves the epoch odd, and the
            // bitmap is made anew.
            assert_eq!(word & mask, if used { 0 } else { mask }, "pages of {extent:?} taken twice");
            place.store(word ^ mask, Ordering::Relaxed);
            at += count;
        }
    }
}

/// Keeps the [`EXTENTS_MAX`] longest runs, the longest first.
fn keep_longest(longest: &mut Vec<Extent>, run: Extent) {
    if longest.len() == EXTENTS_MAX && longest[EXTENTS_MAX - 1].pages >= run.pages {
        return;
    }
    let place = longest.partition_point(|other| other.pages >= run.pages);
    longest.insert(place, run);
    longest.truncate(EXTENTS_MAX);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    struct Fixture {
        words: Vec<AtomicU64>,
        hints: Hints,
        other_hints: Hints,
        frees: AtomicU64,
        pages: u64,
        piece_pages: u64,
    }

    impl Fixture {
        fn new(pages: u64, piece_pages: u64) -> Self {
            let pieces = u32::try_from(pages.div_ceil(piece_pages)).unwrap();
            Self {
                words: (0..pages.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
                hints: Hints::new(pieces),
                other_hints: Hints::new(pieces),
                frees: AtomicU64::new(0),
                pages,
                piece_pages,
            }
        }

        /// As one of two processes sees it.
        fn view(&self, other: bool) -> Extents<'_> {
            let hints = if other { &self.other_hints } else { &self.hints };
            Extents::new(&self.words, self.pages, self.piece_pages, hints, &self.frees)
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]
        /// Goal: no page is given twice, none is lost, boundaries and limits hold, and a request is
        /// refused only if a plain search finds no way either.
        #[test]
        fn behaves_like_a_set_of_pages(
            pages in 1..300u64,
            piece_pages in 1..130u64,
            reserved_mask in any::<u8>(),
            ops in prop::collection::vec((any::<bool>(), 0..8u8, 1..90u64), 1..120),
        ) {
            let fixture = Fixture::new(pages, piece_pages);
            let reserved = |piece: u32| reserved_mask >> (piece % 8) & 1 == 1;
            let mut used = vec![false; usize::try_from(pages).unwrap()];
            let mut held: Vec<Vec<Extent>> = Vec::new();
            for (other, kind, size) in ops {
                let view = fixture.view(other);
                if kind < 5 {
                    let expected = plain_search(&used, piece_pages, &reserved, size);
                    let got = view.allocate(size, reserved);
                    prop_assert_eq!(got.as_ref().map(Vec::len), expected);
                    let Some(got) = got else { continue };
                    prop_assert_eq!(got.iter().map(|e| e.pages).sum::<u64>(), size);
                    for extent in &got {
                        let piece = view.piece_of(*extent).expect("within one piece");
                        prop_assert!(reserved(u32::try_from(piece).unwrap()));
                        for page in extent.first..extent.end() {
                            prop_assert!(!std::mem::replace(&mut used[index(page)], true));
                        }
                    }
                    held.push(got);
                } else if !held.is_empty() {
                    let size = usize::try_from(size).unwrap();
                    for extent in held.swap_remove(size % held.len()) {
                        view.free(extent);
                        used[index(extent.first)..index(extent.end())].fill(false);
                    }
                }
                prop_assert_eq!(view.used(), used.iter().filter(|&&u| u).count() as u64);
            }
            // A rebuild from what is held gives the same bitmap, and finds a double claim.
            let before: Vec<u64> =
                fixture.words.iter().map(|w| w.load(Ordering::Relaxed)).collect();
            let view = fixture.view(false);
            view.clear();
            for extent in held.iter().flatten() {
                prop_assert!(view.claim(*extent));
                prop_assert!(!view.claim(*extent));
            }
            let after: Vec<u64> = fixture.words.iter().map(|w| w.load(Ordering::Relaxed)).collect();
            prop_assert_eq!(before, after);
        }
    }

    /// How many extents the request should get.
    fn plain_search(
        used: &[bool],
        piece_pages: u64,
        reserved: &dyn Fn(u32) -> bool,
        size: u64,
    ) -> Option<usize> {
        let mut runs: Vec<u64> = Vec::new();
        for (piece, pages) in used.chunks(usize::try_from(piece_pages).unwrap()).enumerate() {
            if reserved(u32::try_from(piece).unwrap()) {
                runs.extend(pages.split(|&u| u).map(|run| run.len() as u64).filter(|&n| n > 0));
            }
        }
        runs.sort_unstable_by(|a, b| b.cmp(a));
        let mut sum = 0;
        runs.iter()
            .take(EXTENTS_MAX)
            .position(|run| {
                sum += run;
                sum >= size
            })
            .map(|n| n + 1)
    }

    fn index(page: u64) -> usize {
        usize::try_from(page).unwrap()
    }

    #[test]
    fn extents_outside_of_a_piece_are_refused() {
        let fixture = Fixture::new(100, 40);
        let view = fixture.view(false);
        for (first, pages) in [(39, 2), (100, 1), (99, 2), (0, 0), (u64::MAX, 2)] {
            assert!(!view.claim(Extent { first, pages }), "{first} {pages}");
        }
        assert!(view.claim(Extent { first: 80, pages: 20 }));
        assert_eq!(view.used(), 20);
    }
}
