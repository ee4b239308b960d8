//! The store as a whole, in one process.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::time::{Duration, Instant};

use crc_fast::CrcAlgorithm::Crc64Nvme;
use proptest::prelude::*;

use super::*;
use crate::pool::PoolOptions;

const NAMESPACE: Namespace = Namespace([7; 32]);

/// A store in a directory of its own, with a private pool: dropping both is a restart.
struct Rig {
    dir: tempfile::TempDir,
    capacity: Option<u64>,
    records: u32,
}

impl Rig {
    fn new(capacity: Option<u64>) -> Self {
        Self { dir: tempfile::tempdir().unwrap(), capacity, records: 512 }
    }

    fn cache_dir(&self) -> PathBuf {
        self.dir.path().join("cache")
    }

    fn open_unscanned(&self) -> Arc<DiskStore> {
        let pool = Pool::open(PoolOptions {
            ram_dir: self.dir.path().join("ram"),
            cache_dir: Some(self.cache_dir()),
            disk_capacity_bytes: self.capacity,
            l2_records: Some(self.records),
            ..PoolOptions::private(16 << 20)
        });
        DiskStore::open(pool.unwrap(), self.cache_dir(), DiskOptions::default()).unwrap()
    }

    fn open(&self) -> Arc<DiskStore> {
        let store = self.open_unscanned();
        store.start_scan();
        let end = Instant::now() + Duration::from_mins(1);
        while !store.scan_done() {
            assert!(Instant::now() < end, "the scan does not end");
            std::thread::sleep(Duration::from_millis(2));
        }
        store
    }

    /// Bytes of all object files.
    fn bytes(&self) -> u64 {
        let mut bytes = 0;
        let mut dirs = vec![self.cache_dir()];
        while let Some(dir) = dirs.pop() {
            for entry in sys::object::list(&dir).unwrap() {
                if entry.is_dir {
                    dirs.push(dir.join(entry.name));
                } else if entry.name.strip_suffix(".kv").is_some() {
                    bytes += entry.len;
                }
            }
        }
        bytes
    }
}

fn key(n: u32) -> ObjectKey {
    ObjectKey::derive(&NAMESPACE, 0, &n.to_le_bytes())
}

fn info(n: u32, payload_bytes: u64) -> ObjectInfo {
    ObjectInfo {
        key: key(n),
        parent: None,
        kind: 0,
        first_token: 0,
        last_token: 256,
        ranks: 1,
        payload_bytes,
    }
}

fn payload(n: u32, bytes: u64) -> Vec<u8> {
    (0..bytes).map(|at| (at.wrapping_mul(31) + u64::from(n)).to_le_bytes()[0]).collect()
}

fn put_info(store: &DiskStore, info: &ObjectInfo, bytes: &[u8]) -> Written {
    let checksum = crc_fast::checksum(Crc64Nvme, bytes);
    let (head, tail) = bytes.split_at(bytes.len() / 3);
    // SAFETY: the slices outlive the call.
    let parts = [head, tail].map(|part| unsafe { Segment::new(part.as_ptr(), part.len() as u64) });
    store.write(info, &NAMESPACE, checksum, &parts).unwrap()
}

fn put(store: &DiskStore, n: u32, bytes: u64) -> Written {
    put_info(store, &info(n, bytes), &payload(n, bytes))
}

fn get(store: &DiskStore, n: u32) -> Option<Vec<u8>> {
    let lease = store.lease(&key(n)).unwrap()?;
    let header = store.read_header(&lease).unwrap()?;
    let mut bytes = vec![0; usize::try_from(header.info.payload_bytes).unwrap()];
    let path = store.path(&NAMESPACE, &key(n));
    fs::File::open(path).unwrap().read_exact_at(&mut bytes, format::HEADER_BYTES).unwrap();
    assert_eq!(crc_fast::checksum(Crc64Nvme, &bytes), header.payload_checksum);
    Some(bytes)
}

fn has(store: &DiskStore, n: u32) -> bool {
    let mut found = Vec::new();
    store.lookup(&[key(n)], &mut found);
    found[0]
}

#[test]
fn what_is_stored_is_read_again_also_after_a_restart() {
    let rig = Rig::new(None);
    let store = rig.open();
    for (n, bytes) in [(1, 4096), (2, 10_000), (3, 1), (4, 0)] {
        assert_eq!(put(&store, n, bytes), Written::Stored);
        assert_eq!(put(&store, n, bytes), Written::Exists);
        assert_eq!(get(&store, n).unwrap(), payload(n, bytes));
    }
    let before = store.gauges();
    assert_eq!(before.bytes, rig.bytes());
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let path = store.path(&NAMESPACE, &key(2));
    assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
    for saved in [true, false] {
        if saved {
            store.close();
        } else {
            fs::remove_file(rig.cache_dir().join("objects.snapshot")).unwrap();
        }
    }
    drop(store);
    let store = rig.open();
    assert_eq!((store.gauges().bytes, store.gauges().objects), (before.bytes, 4));
    assert_eq!(get(&store, 2).unwrap(), payload(2, 10_000));
    store.check().unwrap();
}

#[test]
fn nothing_is_stored_before_the_directory_is_known() {
    let rig = Rig::new(None);
    let store = rig.open_unscanned();
    assert_eq!(put(&store, 1, 100), Written::ScanPending);
    assert_eq!(rig.bytes(), 0);
}

#[test]
fn the_least_recent_goes_first_and_leased_ones_stay() {
    let rig = Rig::new(Some(4 * 8192));
    let store = rig.open();
    for n in 0..4 {
        assert_eq!(put(&store, n, 4096), Written::Stored);
    }
    store.touch(&[key(0)]);
    let lease = store.lease(&key(1)).unwrap().unwrap();
    assert_eq!(put(&store, 4, 4096), Written::Stored);
    assert!(has(&store, 0) && has(&store, 1) && !has(&store, 2) && has(&store, 3));
    assert_eq!(store.gauges().leased_skips, 1);
    drop(lease);
    assert_eq!(put(&store, 5, 4 * 8192), Written::NoRoom(NoRoom::TooLarge));
    let leases: Vec<_> = [0, 1, 3, 4].map(|n| store.lease(&key(n)).unwrap().unwrap()).into();
    assert_eq!(put(&store, 6, 4096), Written::NoRoom(NoRoom::Leased));
    drop(leases);
    assert_eq!(put(&store, 6, 4096), Written::Stored);
    assert_eq!(rig.bytes(), 4 * 8192);
    store.check().unwrap();
}

#[test]
fn suffixes_go_before_the_prefixes_they_need() {
    let rig = Rig::new(Some(4 * 8192));
    let store = rig.open();
    for n in 0..4 {
        let parent = (n > 0).then(|| key(n - 1));
        let info = ObjectInfo { parent, last_token: 256 * (n + 1), ..info(n, 4096) };
        assert_eq!(put_info(&store, &info, &payload(n, 4096)), Written::Stored);
    }
    let there = |store: &DiskStore| [0, 1, 2, 3].map(|n| has(store, n));
    put(&store, 10, 4096);
    assert_eq!(there(&store), [true, true, true, false]);
    put(&store, 11, 4096);
    assert_eq!(there(&store), [true, true, false, false]);
}

#[test]
fn the_order_of_use_survives_a_restart() {
    let rig = Rig::new(Some(4 * 8192));
    let store = rig.open();
    for n in 0..4 {
        put(&store, n, 4096);
    }
    store.touch(&[key(0)]);
    store.close();
    drop(store);
    let store = rig.open();
    put(&store, 9, 4096);
    assert_eq!([0, 1, 2, 3].map(|n| has(&store, n)), [true, false, true, true]);
}

#[test]
fn a_smaller_limit_holds_after_the_next_scan() {
    let mut rig = Rig::new(None);
    let store = rig.open();
    (0..8).for_each(|n| assert_eq!(put(&store, n, 4096), Written::Stored));
    drop(store);
    rig.capacity = Some(3 * 8192);
    let store = rig.open();
    assert_eq!((store.gauges().bytes, rig.bytes()), (3 * 8192, 3 * 8192));
}

#[test]
fn a_full_table_evicts() {
    let mut rig = Rig::new(None);
    rig.records = 4;
    let store = rig.open();
    (0..9).for_each(|n| assert_eq!(put(&store, n, 100), Written::Stored));
    assert_eq!(store.gauges().objects, 4);
    assert_eq!(rig.bytes(), 4 * 8192);
    store.check().unwrap();
}

type Lie = fn(&Path);

/// What a file can pretend, and the verdict.
fn lies() -> Vec<(Damage, Lie)> {
    fn edit(path: &Path, at: u64, bytes: &[u8]) {
        fs::OpenOptions::new().write(true).open(path).unwrap().write_all_at(bytes, at).unwrap();
    }
    fn length(path: &Path, bytes: u64) {
        fs::OpenOptions::new().write(true).open(path).unwrap().set_len(bytes).unwrap();
    }
    fn header(path: &Path, change: fn(&mut Header)) {
        let mut header = Header::parse(&fs::read(path).unwrap()).unwrap();
        change(&mut header);
        edit(path, 0, &header.encode().0);
    }
    fn version(path: &Path) {
        let mut page = fs::read(path).unwrap()[..4096].to_vec();
        page[8] = 2;
        let checksum = crc_fast::checksum(Crc64Nvme, &page[..4088]);
        page[4088..].copy_from_slice(&checksum.to_le_bytes());
        edit(path, 0, &page);
    }
    vec![
        (Damage::Magic, |path| edit(path, 0, b"XXXX")),
        (Damage::Version, version),
        (Damage::HeaderChecksum, |path| edit(path, 60, b"XXXX")),
        (Damage::Key, |path| header(path, |header| header.info.key = key(99))),
        (Damage::Namespace, |path| header(path, |header| header.namespace = Namespace([8; 32]))),
        (Damage::Truncated, |path| length(path, 8192)),
        (Damage::Truncated, |path| length(path, 100)),
        (Damage::Truncated, |path| length(path, 0)),
        (Damage::Longer, |path| length(path, 1 << 20)),
        (Damage::Truncated, |path| header(path, |header| header.info.payload_bytes = 1 << 40)),
    ]
}

#[test]
fn every_lying_file_is_a_miss_and_counted_by_kind() {
    for (damage, lie) in lies() {
        let rig = Rig::new(None);
        let store = rig.open();
        put(&store, 1, 10_000);
        lie(&store.path(&NAMESPACE, &key(1)));
        assert!(get(&store, 1).is_none(), "{damage:?}");
        assert_eq!(store.gauges().damaged[damage.index()], 1, "{damage:?}");
        assert!(!has(&store, 1) && store.is_negative(&key(1)));
        assert_eq!((rig.bytes(), store.gauges().bytes), (0, 0));
        assert_eq!(put(&store, 1, 10_000), Written::Stored);
        assert!(has(&store, 1) && !store.is_negative(&key(1)));
        assert_eq!(get(&store, 1).unwrap(), payload(1, 10_000));
    }
}

#[test]
fn what_has_an_objects_name_and_is_no_file_goes_when_it_is_met() {
    let link: Lie = |path| std::os::unix::fs::symlink("nowhere", path).unwrap();
    for impostor in [link, |path| fs::create_dir(path).unwrap()] {
        let rig = Rig::new(None);
        let store = rig.open();
        let direct = store.direct.load(Ordering::Relaxed);
        let path = store.path(&NAMESPACE, &key(1));
        let replace = |store: &DiskStore| {
            assert_eq!(put(store, 1, 10_000), Written::Stored);
            assert_eq!(get(store, 1).unwrap(), payload(1, 10_000));
            fs::remove_file(&path).unwrap();
            impostor(&path);
        };
        replace(&store);
        assert!(store.lease(&key(1)).unwrap().is_none(), "read");
        assert_eq!(store.gauges().damaged.iter().sum::<u64>(), 1);
        assert!(!has(&store, 1) && store.is_negative(&key(1)));
        assert_eq!((store.gauges().bytes, store.direct.load(Ordering::Relaxed)), (0, direct));
        replace(&store);
        assert_eq!(store.make_room(1).unwrap(), evict::Room::Made, "evicted");
        replace(&store);
        drop(store);
        let store = rig.open();
        assert_eq!(store.gauges().bytes, 0, "found by a scan");
        replace(&store);
        store.check().unwrap();
    }
}

#[test]
fn the_scan_removes_lying_files_and_leftovers() {
    for (damage, lie) in lies() {
        let rig = Rig::new(None);
        let store = rig.open();
        put(&store, 1, 10_000);
        put(&store, 2, 10_000);
        let path = store.path(&NAMESPACE, &key(1));
        lie(&path);
        let left = path.with_file_name(format!(".{}.0123.tmp", key(5).hex()));
        fs::write(&left, b"half").unwrap();
        let foreign = path.with_file_name("notes.txt");
        fs::write(&foreign, b"not ours").unwrap();
        drop(store);
        let store = rig.open();
        assert_eq!(store.gauges().damaged[damage.index()], 1, "{damage:?}");
        assert!(!path.exists() && !left.exists() && foreign.exists());
        assert_eq!(get(&store, 2).unwrap(), payload(2, 10_000));
        assert_eq!(store.gauges().bytes, rig.bytes());
    }
}

#[test]
fn quarantine_spares_a_file_that_took_the_place_of_the_damaged_one() {
    let rig = Rig::new(None);
    let store = rig.open();
    put(&store, 1, 100);
    let lease = store.lease(&key(1)).unwrap().unwrap();
    let path = store.path(&NAMESPACE, &key(1));
    let copy = path.with_extension("copy");
    fs::copy(&path, &copy).unwrap();
    fs::rename(&copy, &path).unwrap();
    store.quarantine(&lease, Damage::Payload);
    assert!(path.exists());
    assert_eq!(store.gauges().damaged[Damage::Payload.index()], 1);
}

#[test]
fn a_file_already_there_is_adopted_if_right_else_replaced() {
    for right in [true, false] {
        let rig = Rig::new(None);
        let store = rig.open();
        put(&store, 1, 5000);
        let path = store.path(&NAMESPACE, &key(1));
        let kept = fs::read(&path).unwrap();
        let lease = store.lease(&key(1)).unwrap().unwrap();
        store.quarantine(&lease, Damage::Payload);
        store.forget_negative(&key(1));
        fs::write(&path, if right { &kept[..] } else { &kept[..4096] }).unwrap();
        let expected = if right { Written::Exists } else { Written::Stored };
        assert_eq!(put(&store, 1, 5000), expected);
        assert_eq!(get(&store, 1).unwrap(), payload(1, 5000));
        assert_eq!(store.gauges().bytes, rig.bytes());
    }
}

#[test]
fn a_vanished_file_is_a_miss_and_its_bytes_come_back() {
    let rig = Rig::new(None);
    let store = rig.open();
    put(&store, 1, 5000);
    fs::remove_file(store.path(&NAMESPACE, &key(1))).unwrap();
    assert!(store.lease(&key(1)).unwrap().is_none() && !has(&store, 1));
    assert_eq!((store.gauges().missing, store.gauges().bytes), (1, 0));
}

#[test]
fn the_manifest_is_readable() {
    let rig = Rig::new(None);
    let store = rig.open();
    store.write_manifest(&NAMESPACE, "{\"model\": \"tiny\"}").unwrap();
    let path = rig.cache_dir().join(NAMESPACE.hex()).join("manifest.json");
    assert_eq!(fs::read_to_string(path).unwrap(), "{\"model\": \"tiny\"}");
}

#[test]
fn stores_and_the_removal_of_empty_directories_do_not_fail_each_other() {
    // So few that most stores leave an empty directory behind, and begin in a new one.
    let rig = Rig::new(Some(4 * 8192));
    let store = rig.open();
    let mut removed = 0;
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for n in 0..300 {
                assert_eq!(put(&store, n, 10), Written::Stored);
            }
        });
        while !writer.is_finished() {
            for entry in fs::read_dir(store.namespace_dir(&NAMESPACE)).into_iter().flatten() {
                removed += u32::from(fs::remove_dir(entry.unwrap().path()).is_ok());
            }
            // A writer tries a bounded number of times: nobody removes without a pause.
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    assert!(removed > 0);
    assert_eq!(store.gauges().errors, 0);
    assert_eq!(store.gauges().bytes, rig.bytes());
    store.check().unwrap();
}

#[test]
fn a_start_with_a_smaller_table_keeps_the_most_recent() {
    let mut rig = Rig::new(None);
    let store = rig.open();
    (0..40).for_each(|n| assert_eq!(put(&store, n, 10), Written::Stored));
    store.touch(&[key(3)]);
    store.close();
    drop(store);
    rig.records = 16;
    let store = rig.open();
    let gauges = store.gauges();
    assert_eq!((gauges.objects, gauges.evicted, gauges.swept), (16, 24, 0));
    assert_eq!(gauges.bytes, rig.bytes());
    let kept: Vec<u32> = (0..40).filter(|&n| has(&store, n)).collect();
    assert_eq!(kept, [&[3], &(25..40).collect::<Vec<_>>()[..]].concat());
    store.check().unwrap();
}

#[derive(Debug, Clone)]
enum Action {
    Put(u32, u64),
    Get(u32),
    Touch(Vec<u32>),
    Restart,
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let key = 0..12_u32;
    let action = prop_oneof![
        6 => (key.clone(), 0..20_000_u64).prop_map(|(n, bytes)| Action::Put(n, bytes)),
        4 => key.clone().prop_map(Action::Get),
        2 => proptest::collection::vec(key, 0..4).prop_map(Action::Touch),
        1 => Just(Action::Restart),
    ];
    proptest::collection::vec(action, 1..40)
}

/// The store in a few lines: sizes, and keys from the least to the most recent.
#[derive(Default)]
struct Model {
    sizes: BTreeMap<u32, u64>,
    order: Vec<u32>,
}

impl Model {
    fn front(&mut self, n: u32) {
        self.order.retain(|&other| other != n);
        self.order.push(n);
    }

    fn put(&mut self, n: u32, bytes: u64, limit: u64) -> Written {
        let file = format::file_bytes(bytes).unwrap();
        if file > limit {
            return Written::NoRoom(NoRoom::TooLarge);
        }
        if self.sizes.contains_key(&n) {
            return Written::Exists;
        }
        while self.bytes() + file > limit {
            let victim = self.order.remove(0);
            self.sizes.remove(&victim);
        }
        self.sizes.insert(n, bytes);
        self.front(n);
        Written::Stored
    }

    fn bytes(&self) -> u64 {
        self.sizes.values().map(|&bytes| format::file_bytes(bytes).unwrap()).sum()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn the_store_behaves_as_its_model(actions in actions()) {
        let limit = 60_000;
        let rig = Rig::new(Some(limit));
        let mut store = rig.open();
        let mut model = Model::default();
        for action in actions {
            match action {
                Action::Put(n, bytes) => {
                    prop_assert_eq!(put(&store, n, bytes), model.put(n, bytes, limit));
                }
                Action::Get(n) => {
                    let expected = model.sizes.get(&n).map(|&bytes| payload(n, bytes));
                    prop_assert_eq!(get(&store, n), expected);
                }
                Action::Touch(chain) => {
                    store.touch(&chain.iter().map(|&n| key(n)).collect::<Vec<_>>());
                    for n in chain.into_iter().rev() {
                        if model.sizes.contains_key(&n) {
                            model.front(n);
                        }
                    }
                }
                Action::Restart => {
                    store.close();
                    drop(store);
                    store = rig.open();
                }
            }
            prop_assert!(rig.bytes() <= limit);
            prop_assert_eq!((rig.bytes(), store.gauges().bytes), (model.bytes(), model.bytes()));
            for n in 0..12 {
                prop_assert_eq!(has(&store, n), model.sizes.contains_key(&n));
            }
            prop_assert_eq!(store.check(), Ok(()));
        }
    }
}
