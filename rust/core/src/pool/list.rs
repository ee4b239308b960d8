//! An intrusive LRU list over a table: `u32` links in the entries, the ends in the table's root.
//!
//! `next` leads from the most recent entry (head) to the least recent (tail). Only holders of the
//! writer lock change or walk it; a writer's death leaves the epoch odd and the list is rebuilt.

use std::sync::atomic::{AtomicU32, Ordering};

use super::layout::{NONE, TableRoot};
use super::writer::Writer;

/// Where a table keeps the links of entry `i`.
pub trait Links {
    /// The link towards the head (more recent).
    fn prev(&self, i: u32) -> &AtomicU32;
    /// The link towards the tail (less recent).
    fn next(&self, i: u32) -> &AtomicU32;
}

/// A view of one table's list.
#[derive(Clone, Copy)]
pub struct List<'a, L: Links> {
    root: &'a TableRoot,
    links: &'a L,
}

fn get(link: &AtomicU32) -> u32 {
    link.load(Ordering::Relaxed)
}

fn set(link: &AtomicU32, i: u32) {
    link.store(i, Ordering::Relaxed);
}

impl<'a, L: Links> List<'a, L> {
    /// The list with its ends in `root` and its links in `links`.
    pub fn new(root: &'a TableRoot, links: &'a L) -> Self {
        Self { root, links }
    }

    /// The most recent entry.
    pub fn head(&self) -> Option<u32> {
        some(get(&self.root.head))
    }

    /// The least recent entry.
    pub fn tail(&self) -> Option<u32> {
        some(get(&self.root.tail))
    }

    /// Forgets all entries, for a rebuild.
    pub fn clear(&self, _writer: &mut Writer) {
        set(&self.root.head, NONE);
        set(&self.root.tail, NONE);
    }

    /// Makes `i`, which is in no list, the most recent entry.
    pub fn push_front(&self, _writer: &mut Writer, i: u32) {
        self.link_between(NONE, i, get(&self.root.head));
    }

    /// Makes `i`, which is in no list, the least recent entry.
    pub fn push_back(&self, _writer: &mut Writer, i: u32) {
        self.link_between(get(&self.root.tail), i, NONE);
    }

    /// Puts `i`, which is in no list, on the older side of `parent`, which is in this one: so a
    /// parent is evicted after its children.
    pub fn insert_behind(&self, _writer: &mut Writer, parent: u32, i: u32) {
        self.link_between(parent, i, get(self.links.next(parent)));
    }

    /// Takes `i`, which is in this list, out of it.
    pub fn unlink(&self, _writer: &mut Writer, i: u32) {
        let (prev, next) = (get(self.links.prev(i)), get(self.links.next(i)));
        set(self.next_of(prev), next);
        set(self.prev_of(next), prev);
        set(self.links.prev(i), NONE);
        set(self.links.next(i), NONE);
    }

    /// Makes `i`, which is in this list, the most recent entry.
    pub fn move_to_front(&self, writer: &mut Writer, i: u32) {
        if self.head() != Some(i) {
            self.unlink(writer, i);
            self.push_front(writer, i);
        }
    }

    /// From the least recent to the most recent. The entry just yielded may be unlinked or moved;
    /// the one after it may not, until it has been yielded.
    pub fn iter_from_tail(&self) -> impl Iterator<Item = u32> + use<'a, L> {
        // `successors` reads the following link before it yields an entry.
        let links = self.links;
        std::iter::successors(self.tail(), move |&i| some(get(links.prev(i))))
    }

    fn link_between(&self, prev: u32, i: u32, next: u32) {
        debug_assert!(i != NONE && prev != i && next != i, "entry {i} is already linked here");
        set(self.links.prev(i), prev);
        set(self.links.next(i), next);
        set(self.next_of(prev), i);
        set(self.prev_of(next), i);
    }

    fn next_of(&self, i: u32) -> &AtomicU32 {
        if i == NONE { &self.root.head } else { self.links.next(i) }
    }

    fn prev_of(&self, i: u32) -> &AtomicU32 {
        if i == NONE { &self.root.tail } else { self.links.prev(i) }
    }
}

fn some(i: u32) -> Option<u32> {
    (i != NONE).then_some(i)
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;
    use crate::pool::{Pool, PoolOptions, Wait};

    struct Table(Vec<(AtomicU32, AtomicU32)>);

    impl Links for Table {
        fn prev(&self, i: u32) -> &AtomicU32 {
            &self.0[i as usize].0
        }
        fn next(&self, i: u32) -> &AtomicU32 {
            &self.0[i as usize].1
        }
    }

    #[derive(Debug, Clone)]
    enum Op {
        PushFront(u32),
        PushBack(u32),
        Behind(u32, u32),
        Unlink(u32),
        ToFront(u32),
    }

    fn op() -> impl Strategy<Value = Op> {
        let i = 0..16u32;
        prop_oneof![
            i.clone().prop_map(Op::PushFront),
            i.clone().prop_map(Op::PushBack),
            (i.clone(), i.clone()).prop_map(|(p, i)| Op::Behind(p, i)),
            i.clone().prop_map(Op::Unlink),
            i.prop_map(Op::ToFront),
        ]
    }

    /// The model keeps the most recent entry in front. Operations whose condition (in the list, or
    /// not) does not hold are skipped.
    fn apply(list: &List<Table>, writer: &mut Writer, model: &mut VecDeque<u32>, op: &Op) {
        let at = |model: &VecDeque<u32>, i: u32| model.iter().position(|&other| other == i);
        match *op {
            Op::PushFront(i) if at(model, i).is_none() => {
                list.push_front(writer, i);
                model.push_front(i);
            }
            Op::PushBack(i) if at(model, i).is_none() => {
                list.push_back(writer, i);
                model.push_back(i);
            }
            Op::Behind(parent, i) if at(model, i).is_none() => {
                if let Some(place) = at(model, parent) {
                    list.insert_behind(writer, parent, i);
                    model.insert(place + 1, i);
                }
            }
            Op::Unlink(i) => {
                if let Some(place) = at(model, i) {
                    list.unlink(writer, i);
                    model.remove(place);
                }
            }
            Op::ToFront(i) => {
                if let Some(place) = at(model, i) {
                    list.move_to_front(writer, i);
                    model.remove(place);
                    model.push_front(i);
                }
            }
            _ => {}
        }
    }

    fn with_writer(f: impl FnOnce(&mut Writer)) {
        let pool = Pool::open(PoolOptions::private(8 << 20)).unwrap();
        pool.write(Wait::Try, f).unwrap().unwrap();
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn behaves_like_a_deque(ops in prop::collection::vec(op(), 0..80)) {
            let (root, table) = (TableRoot::new(), Table((0..16).map(|_| Default::default()).collect()));
            let list = List::new(&root, &table);
            let mut model = VecDeque::new();
            with_writer(|writer| {
                for op in &ops {
                    apply(&list, writer, &mut model, op);
                    assert_eq!(list.head(), model.front().copied());
                    assert_eq!(list.tail(), model.back().copied());
                    assert!(list.iter_from_tail().eq(model.iter().rev().copied()), "{op:?}");
                }
            });
        }
    }

    #[test]
    fn the_yielded_entry_may_be_unlinked_while_walking() {
        let (root, table) = (TableRoot::new(), Table((0..4).map(|_| Default::default()).collect()));
        let list = List::new(&root, &table);
        with_writer(|writer| {
            for i in 0..4 {
                list.push_front(writer, i);
            }
            let mut seen = Vec::new();
            for i in list.iter_from_tail() {
                list.unlink(writer, i);
                seen.push(i);
            }
            assert_eq!(seen, [0, 1, 2, 3]);
            assert_eq!((list.head(), list.tail()), (None, None));
        });
    }
}
