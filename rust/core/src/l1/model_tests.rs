//! Goal: table, extents and LRU together do what a list of objects does that a page of code keeps.
//! Method: random operations on both; after each, the invariants hold and both have the same order.

use proptest::prelude::*;

use super::tests::{arena, find, key, meta};
use super::*;
use crate::pool::TableHooks;

const KEYS: u64 = 24;
const ENTRIES: u32 = 12;

#[derive(Debug, Clone)]
enum Op {
    /// Key, whether its predecessor is its parent, eighths of the arena.
    Reserve(u64, bool, u64),
    /// The n-th object, dirty or not.
    Publish(usize, bool),
    Pin(usize),
    Unpin(usize),
    Abandon(usize),
    Discard(usize),
    /// The chain of so many keys from this one.
    Touch(u64, u64),
    WriteBack,
    Clear,
    Rebuild,
}

fn op() -> impl Strategy<Value = Op> {
    let n = 0..ENTRIES as usize;
    prop_oneof![
        6 => (0..KEYS, any::<bool>(), 1..4u64).prop_map(|(n, p, s)| Op::Reserve(n, p, s)),
        6 => (n.clone(), prop::bool::weighted(0.2)).prop_map(|(n, d)| Op::Publish(n, d)),
        2 => n.clone().prop_map(Op::Pin),
        6 => n.clone().prop_map(Op::Unpin),
        1 => n.clone().prop_map(Op::Abandon),
        1 => n.prop_map(Op::Discard),
        2 => (0..KEYS, 1..5u64).prop_map(|(n, count)| Op::Touch(n, count)),
        1 => Just(Op::WriteBack),
        1 => Just(Op::Clear),
        1 => Just(Op::Rebuild),
    ]
}

#[derive(Debug, Clone)]
struct Object {
    n: u64,
    slot: Slot,
    pages: u64,
    state: State,
    pins: u32,
    dirty: bool,
}

impl Object {
    fn is_evictable(&self) -> bool {
        self.state == State::Ready && self.pins == 0 && !self.dirty
    }
}

/// Objects, the most recent first.
struct Model {
    objects: Vec<Object>,
    pages: u64,
    /// All objects have the same size: memory is never fragmented.
    uniform: bool,
}

impl Model {
    fn live(&self, n: u64) -> Option<usize> {
        self.objects.iter().position(|o| o.n == n && o.state != State::Dying)
    }

    fn free_pages(&self) -> u64 {
        self.pages - self.objects.iter().map(|o| o.pages).sum::<u64>()
    }

    fn has_room(&self, pages: u64) -> bool {
        self.free_pages() >= pages && self.objects.len() < ENTRIES as usize
    }

    /// The least recent object that may go, other than the parent's.
    fn victim(&self, parent: Option<u64>) -> Option<usize> {
        self.objects.iter().rposition(|o| o.is_evictable() && Some(o.n) != parent)
    }

    fn reserve(&mut self, arena: &Arena, n: u64, child: bool, eighths: u64) {
        let eighth = self.pages / 8;
        let pages = if self.uniform { eighth } else { eighth * eighths - n % 3 };
        let parent = n.checked_sub(1).filter(|&p| child && self.live(p).is_some());
        let meta = meta(n, parent, pages * PAGE_BYTES - n % 5);
        let got = arena.reserve(&meta, Purpose::Load, Wait::Try).unwrap();
        if let Some(at) = self.live(n) {
            assert_eq!(got, Reserve::Exists(self.objects[at].slot));
            return;
        }
        // Objects go in the order of the list, and only as long as there is no room.
        let gone = |o: &Object| arena.word_of(o.slot).is_none_or(|w| w.state() == State::Empty);
        while self.objects.iter().any(gone) {
            let at = self.victim(parent).expect("nothing else may go");
            assert!(gone(&self.objects[at]), "{:?} should have gone first", self.objects[at]);
            assert!(!self.uniform || !self.has_room(pages), "evicted in vain");
            self.objects.remove(at);
        }
        match got {
            Reserve::Slot(slot) => {
                assert!(self.has_room(pages));
                let state = State::Filling;
                let object = Object { n, slot, pages, state, pins: 1, dirty: false };
                let behind = parent.and_then(|p| self.live(p));
                self.objects.insert(behind.map_or(0, |at| at + 1), object);
            }
            Reserve::NoRoom => {
                assert!(!self.uniform || !self.has_room(pages));
                // Without fragments, it gives up only when all that may go together is too little.
                let idle = self.objects.iter().filter(|o| o.is_evictable() && Some(o.n) != parent);
                let pages_idle: u64 = idle.map(|o| o.pages).sum();
                let little = self.free_pages() + pages_idle < pages;
                assert!(little || self.victim(parent).is_none(), "no room, but victims");
            }
            other => panic!("{other:?}"),
        }
    }

    fn unpin(&mut self, arena: &Arena, at: usize) {
        let object = &mut self.objects[at];
        if object.pins == 0 {
            return;
        }
        arena.unpin(object.slot);
        object.pins -= 1;
        if object.pins == 0 && object.state == State::Dying {
            self.objects.remove(at);
        }
    }

    fn abandon(&mut self, arena: &Arena, at: usize) {
        arena.abandon(self.objects[at].slot);
        if self.objects[at].state == State::Filling {
            self.dies(at);
        }
    }

    fn discard(&mut self, arena: &Arena, at: usize) {
        let ready = self.objects[at].state == State::Ready;
        assert_eq!(arena.discard(self.objects[at].slot), ready);
        if ready {
            self.dies(at);
        }
    }

    fn dies(&mut self, at: usize) {
        let mut object = self.objects.remove(at);
        (object.state, object.dirty) = (State::Dying, false);
        if object.pins > 0 {
            self.objects.push(object);
        }
    }

    fn touch(&mut self, arena: &Arena, chain: &[u64]) {
        arena.touch(&chain.iter().map(|&n| key(n)).collect::<Vec<_>>());
        for &n in chain.iter().rev() {
            if let Some(at) = self.live(n) {
                let object = self.objects.remove(at);
                self.objects.insert(0, object);
            }
        }
    }

    fn apply(&mut self, arena: &Arena, op: &Op) {
        let at = |n: usize| Some(n).filter(|&n| n < self.objects.len());
        match *op {
            Op::Reserve(n, child, eighths) => self.reserve(arena, n, child, eighths),
            Op::Publish(n, dirty) => {
                let Some(object) = at(n).map(|n| &mut self.objects[n]) else { return };
                let filling = object.state == State::Filling;
                assert_eq!(arena.publish(object.slot, object.n, dirty), filling);
                if filling {
                    (object.state, object.dirty) = (State::Ready, dirty);
                }
            }
            Op::Pin(n) => {
                let Some(object) = at(n).map(|n| &mut self.objects[n]) else { return };
                let pinned = arena.pin(object.slot);
                assert_eq!(pinned, object.state != State::Dying);
                object.pins += u32::from(pinned);
            }
            Op::Unpin(n) => {
                let Some(n) = at(n) else { return };
                self.unpin(arena, n);
            }
            Op::Abandon(n) => {
                let Some(n) = at(n) else { return };
                self.abandon(arena, n);
            }
            Op::Discard(n) => {
                let Some(n) = at(n) else { return };
                self.discard(arena, n);
            }
            Op::Touch(n, count) => self.touch(arena, &(n..n + count).collect::<Vec<_>>()),
            Op::WriteBack => {
                let claimed = arena.dirty(usize::MAX);
                let dirty = self.objects.iter_mut().filter(|o| o.dirty);
                assert_eq!(claimed.len(), dirty.map(|o| o.dirty = false).count());
                for slot in claimed {
                    arena.set_clean(slot);
                }
            }
            Op::Clear => {
                arena.clear();
                self.objects.retain(|o| !o.is_evictable());
            }
            Op::Rebuild => {
                arena.write(Wait::Try, |w| arena.table.rebuild(w)).unwrap().unwrap();
                // Order among equals of one stamp is not kept; the next comparison takes it over.
                self.adopt_order(arena);
            }
        }
    }

    fn adopt_order(&mut self, arena: &Arena) {
        let order: Vec<u32> = arena.table.list().iter_from_tail().collect();
        let place = |o: &Object| order.iter().position(|&i| i == o.slot.entry);
        self.objects.sort_by_key(|o| std::cmp::Reverse(place(o)));
    }

    fn compare(&self, arena: &Arena) {
        arena.check().unwrap();
        let order: Vec<u32> = arena.table.list().iter_from_tail().collect();
        let expected: Vec<u32> = self.objects.iter().rev().map(|o| o.slot.entry).collect();
        assert_eq!(order, expected, "from the least recent: {:?}", self.objects);
        for object in &self.objects {
            let state = match object.state {
                State::Filling => SlotState::Filling,
                State::Ready => SlotState::Ready,
                _ => SlotState::Gone,
            };
            assert_eq!(arena.state(object.slot), state);
        }
        for n in 0..KEYS {
            let found = find(arena, n).map(|(slot, _)| slot);
            assert_eq!(found, self.live(n).map(|at| self.objects[at].slot));
        }
        let gauges = arena.gauges();
        assert_eq!(gauges.bytes_used, (self.pages - self.free_pages()) * PAGE_BYTES);
        let count =
            |f: &dyn Fn(&Object) -> bool| self.objects.iter().filter(|o| f(o)).count() as u64;
        assert_eq!(gauges.pinned, count(&|o| o.pins > 0));
        assert_eq!(gauges.dirty, count(&|o| o.dirty));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn behaves_like_a_list_of_objects(
        uniform in any::<bool>(),
        ops in prop::collection::vec(op(), 1..80),
    ) {
        let arena = arena(8 << 20, ENTRIES);
        let pages = arena.gauges().capacity / PAGE_BYTES;
        let mut model = Model { objects: Vec::new(), pages, uniform };
        for op in &ops {
            model.apply(&arena, op);
            model.compare(&arena);
        }
        while !model.objects.is_empty() {
            let at = model.objects.len() - 1;
            let object = &mut model.objects[at];
            if object.pins > 0 {
                model.unpin(&arena, at);
            } else if object.state == State::Filling {
                model.abandon(&arena, at);
            } else {
                arena.dirty(usize::MAX).into_iter().for_each(|slot| arena.set_clean(slot));
                arena.clear();
                model.objects.retain(|o| o.pins > 0 || o.state != State::Ready);
            }
        }
        arena.check().unwrap();
        prop_assert_eq!(arena.gauges().bytes_used, 0);
    }
}
