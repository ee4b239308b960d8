//! Checkpoints of models with recurrent state: a state is of use only with every chunk before it.

use super::{Cache, Inner, Tier};
use crate::ObjectKey;

/// States looked up at a time, from the deepest on: mostly one of the last is there.
const BATCH: usize = 64;

/// A state that is present, as are the chunks that it needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checkpoint {
    /// Its place among the candidates.
    pub index: usize,
    /// How many of the leading chunks it needs.
    pub chunks: usize,
    /// How many of those are in memory.
    pub chunks_in_memory: usize,
    /// Where the state is.
    pub state: Tier,
}

impl Cache {
    /// The deepest complete checkpoints, at most `most` of them, deepest first. `states` are the
    /// candidates in the order of their depth, `per_chunk` of them for each chunk: the candidate of
    /// index `i` needs the first `(i + 1) / per_chunk` of `chunks`. No system call, no lock.
    pub fn lookup_checkpoints(
        &self,
        chunks: &[ObjectKey],
        states: &[ObjectKey],
        per_chunk: usize,
        most: usize,
    ) -> Vec<Checkpoint> {
        let mut in_memory = vec![0];
        for place in self.inner.places(chunks).into_iter().map_while(|place| place) {
            in_memory.push(in_memory[in_memory.len() - 1] + usize::from(place == Tier::Memory));
        }
        let per_chunk = per_chunk.max(1);
        let mut end = states.len().min(in_memory.len().saturating_mul(per_chunk) - 1);
        let mut found = Vec::new();
        while end > 0 && found.len() < most {
            let begin = end.saturating_sub(BATCH);
            let places = self.inner.places(&states[begin..end]);
            for (index, place) in (begin..end).zip(places).rev() {
                if let Some(state) = place {
                    let chunks = (index + 1) / per_chunk;
                    let chunks_in_memory = in_memory[chunks];
                    found.push(Checkpoint { index, chunks, chunks_in_memory, state });
                }
            }
            end = begin;
        }
        found.truncate(most);
        found
    }
}

impl Inner {
    /// Where each object is, if anywhere.
    fn places(&self, keys: &[ObjectKey]) -> Vec<Option<Tier>> {
        let mut memory = Vec::with_capacity(keys.len());
        self.arena.lookup(keys, &mut memory);
        let mut places: Vec<_> =
            memory.iter().map(|found| found.is_some().then_some(Tier::Memory)).collect();
        if let Some(disk) = &self.disk {
            let absent: Vec<_> = (0..keys.len()).filter(|&n| places[n].is_none()).collect();
            let asked: Vec<_> = absent.iter().map(|&n| keys[n]).collect();
            let mut on_disk = Vec::with_capacity(asked.len());
            disk.lookup(&asked, &mut on_disk);
            for (n, there) in absent.into_iter().zip(on_disk) {
                places[n] = there.then_some(Tier::Disk);
            }
        }
        places
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use crate::cache::testing::{LONG, NAMESPACE, open, put};

    fn key(kind: u8, index: u32) -> ObjectKey {
        ObjectKey::derive(&NAMESPACE, kind, &index.to_le_bytes())
    }

    #[test]
    fn a_state_counts_only_with_all_its_chunks() {
        let dir = tempfile::tempdir().unwrap();
        let cache = open(dir.path());
        assert!(cache.wait_scanned(LONG));
        // Two states for each chunk: those of index 0, 1, 2, 3, … need 0, 1, 1, 2, … chunks.
        let chunks: Vec<_> = (0..4).map(|index| key(0, index)).collect();
        let states: Vec<_> = (0..200).map(|index| key(1, index)).collect();
        let found = |cache: &Cache, most| cache.lookup_checkpoints(&chunks, &states, 2, most);
        for index in [0, 2, 3, 6, 150] {
            put(&cache, states[index]);
        }
        let at = |index: usize, in_memory, state| Checkpoint {
            index,
            chunks: index.div_ceil(2),
            chunks_in_memory: in_memory,
            state,
        };
        assert_eq!(found(&cache, 9), [at(0, 0, Tier::Memory)]);
        put(&cache, chunks[0]);
        assert_eq!(found(&cache, 1), [at(2, 1, Tier::Memory)]);
        // A gap: what lies behind it is of no use.
        put(&cache, chunks[2]);
        put(&cache, chunks[3]);
        assert_eq!(found(&cache, 1), [at(2, 1, Tier::Memory)]);
        put(&cache, chunks[1]);
        assert_eq!(found(&cache, 2), [at(6, 3, Tier::Memory), at(3, 2, Tier::Memory)]);
        assert!(cache.clear_memory() > 0);
        assert_eq!(found(&cache, 1), [at(6, 0, Tier::Disk)]);
        assert_eq!(cache.lookup_checkpoints(&[], &[], 2, 1), []);
        cache.close(LONG);
    }
}
