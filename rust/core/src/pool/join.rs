//! Joining a pool, or creating it. All of it happens under the join lock of the cache directory.
//!
//! The pool file's shared `flock` and the lock file's `USE` byte are held for as long as a member
//! lives: the first tells a sweep that the pool is in use, the second tells the next opener of the
//! cache directory whether it is alone, and therefore whether a missing pool may be made anew.

use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::layout::{
    CACHE_DIR_MAX, DATA_BYTES_MIN, FORMAT_VERSION, Geometry, Header, MAGIC, MEMBERS_MAX, Sizes,
};
use super::place::{self, Place};
use super::{Files, Pool, PoolOptions, Role, lock_byte, members, sweep};
use crate::sys::lock::{LockFile, flock_exclusive, flock_shared};
use crate::sys::map::Mapping;
use crate::{Error, ErrorKind, Result, sys};

/// A stopped process can hold the join lock; nobody waits for it for ever.
const JOIN_WAIT: Duration = Duration::from_secs(30);
/// Locks outlive their process for a moment: until its last reads have landed, or until a child that
/// it was just forking has started its program. So long nobody concludes that others are there.
pub(super) const PATIENCE: Duration = Duration::from_secs(1);
const LOOK_AGAIN: Duration = Duration::from_millis(5);
/// Times that a sweep or another creator may replace the file under us, besides.
const ATTEMPTS: u32 = 64;

/// What a pool file turns out to be.
pub(super) enum Found {
    /// Its creator died before it was complete.
    Unpublished,
    /// Made by another version of this format (or not a pool at all).
    OtherFormat(u32),
    Pool(Box<Head>),
}

/// The fixed part of a published header.
pub(super) struct Head {
    pub(super) pool_id: [u8; 16],
    pub(super) incarnation: u64,
    pub(super) geometry: Geometry,
    pub(super) mount_namespace: u64,
    pub(super) cache_dir: Option<PathBuf>,
}

/// Frees the join byte on drop.
pub(super) struct JoinLock<'a>(&'a LockFile);

impl Drop for JoinLock<'_> {
    fn drop(&mut self) {
        self.0.unlock(lock_byte::JOIN);
    }
}

pub(super) fn take_join_lock<'a>(lock: &'a LockFile, place: &Place) -> Result<JoinLock<'a>> {
    if lock.exclusive_within(lock_byte::JOIN, JOIN_WAIT)? {
        return Ok(JoinLock(lock));
    }
    Err(Error::new(
        ErrorKind::Timeout,
        format!(
            "another process has been joining the pool for {} s (lock {}): is it stopped?",
            JOIN_WAIT.as_secs(),
            place.lock_path().display()
        ),
    ))
}

/// Called with the pool that is about to be made anew, as its only member.
pub type BeforeRecreate<'a> = &'a mut dyn FnMut(&Arc<Pool>) -> Result<()>;

struct Opener<'a> {
    options: &'a PoolOptions,
    place: Place,
    geometry: Geometry,
    path: PathBuf,
    id: [u8; 16],
    alone: bool,
    patient_until: Instant,
}

enum Step {
    Joined(Arc<Pool>),
    Again,
    /// Others seem to be there, but may be gone in a moment.
    Patience,
    /// The pool of this id is that of another cache directory.
    OthersPool,
}

/// Repeats `attempt` until it succeeds, for a moment.
pub(super) fn within_patience(attempt: impl Fn() -> Result<bool>) -> Result<bool> {
    let until = Instant::now() + PATIENCE;
    loop {
        if attempt()? {
            return Ok(true);
        }
        if Instant::now() >= until {
            return Ok(false);
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

impl Pool {
    /// Joins the pool that `options` name, or creates it. An only member makes a pool of another
    /// size anew; see [`Pool::open_with`].
    pub fn open(options: PoolOptions) -> Result<Arc<Self>> {
        Self::open_with(options, &mut |_| Ok(()))
    }

    /// As [`Pool::open`]; before a pool of another size is made anew, `before_recreate` gets it, to
    /// write back what is in memory only. It must let go of the pool.
    #[expect(clippy::needless_pass_by_value, reason = "as `open`")]
    pub fn open_with(options: PoolOptions, before_recreate: BeforeRecreate) -> Result<Arc<Self>> {
        if !options.shared {
            return super::private::open(&options);
        }
        let place = Place::prepare(&options.ram_dir, options.cache_dir.as_deref())?;
        let (life, ctl) =
            (LockFile::open(&place.lock_path())?, LockFile::open(&place.lock_path())?);
        let join_file = LockFile::open(&place.lock_path())?;
        let _join = take_join_lock(&join_file, &place)?;
        if !within_patience(|| life.try_shared(lock_byte::USE))? {
            return Err(used_privately(&place));
        }
        let geometry = Geometry::new(&sizes(&options))?;
        check_fits(&geometry, &options)?;
        let id = place.pool_id()?;
        let dir = place.pool_dir(&id);
        // Before our own is made: the pool of a cache_dir that was moved has the same name.
        sweep::remove_orphans(&place.ram_dir);
        sys::file::create_dirs(&dir)?;
        sys::file::dir_is_ours(&dir)?;
        let path = dir.join("pool");
        let patient_until = Instant::now() + PATIENCE;
        let mut opener =
            Opener { options: &options, place, geometry, path, id, alone: false, patient_until };
        let mut locks = Some((life, ctl));
        let mut attempts = 0;
        while attempts < ATTEMPTS {
            if let Some((life, _)) = &locks {
                opener.alone = !life.is_held_elsewhere(lock_byte::USE)?;
            }
            match opener.step(&mut locks, before_recreate)? {
                Step::Joined(pool) => return Ok(pool),
                Step::Again => attempts += 1,
                Step::Patience => std::thread::sleep(LOOK_AGAIN),
                Step::OthersPool => opener.take_new_id()?,
            }
            if !opener.dir_exists()? {
                sys::file::create_dirs(opener.path.parent().unwrap_or(&opener.path))?;
            }
        }
        let text = format!("the pool {} keeps being replaced", opener.path.display());
        Err(Error::new(ErrorKind::Unavailable, text))
    }
}

impl Opener<'_> {
    fn step(
        &self,
        locks: &mut Option<(LockFile, LockFile)>,
        before_recreate: BeforeRecreate,
    ) -> Result<Step> {
        let Some(file) = place::open_pool_file(&self.path)? else {
            return if self.alone {
                self.create().map(|()| Step::Again)
            } else {
                self.refuse(self.unreachable())
            };
        };
        // Whoever has our lock file would be seen, so its users came by another: this directory is a
        // copy of theirs, with the id in it, and its locks say nothing of their lives.
        if self.alone && !flock_exclusive(&file)? {
            return Ok(if self.is_patient() { Step::Patience } else { Step::OthersPool });
        }
        // A sweep has it: it will be gone or free at once.
        if !flock_shared(&file)? {
            std::thread::sleep(Duration::from_millis(2));
            return Ok(Step::Again);
        }
        match read_header(&file)? {
            Found::Unpublished if self.alone => self.unlink(&file, "it was never completed"),
            Found::OtherFormat(_) if self.alone => self.unlink(&file, "it has another format"),
            Found::Unpublished => self.refuse(self.unreachable()),
            Found::OtherFormat(version) => self.refuse(self.other_format(version)),
            Found::Pool(head) => {
                if !self.alone && self.place.incarnation()? != Some(head.incarnation) {
                    return self.refuse(self.unreachable());
                }
                if !self.suits(&head.geometry) {
                    if self.alone {
                        self.write_back(file, &head, before_recreate)?;
                        return Ok(Step::Again);
                    }
                    if self.is_patient() {
                        return Ok(Step::Patience);
                    }
                    self.warn_other_size(&head.geometry);
                }
                self.attach(file, &head, locks, self.options.role)
            }
        }
    }

    fn take_new_id(&mut self) -> Result<()> {
        log::warn!(
            "the pool {} is used with another cache_dir, of which {} is a copy: this one gets a pool \
             of its own",
            self.path.display(),
            self.place.lock_dir.display()
        );
        self.id = self.place.new_pool_id()?;
        self.path = self.place.pool_dir(&self.id).join("pool");
        self.patient_until = Instant::now() + PATIENCE;
        Ok(())
    }

    fn is_patient(&self) -> bool {
        Instant::now() < self.patient_until
    }

    fn refuse(&self, error: Error) -> Result<Step> {
        if self.is_patient() { Ok(Step::Patience) } else { Err(error) }
    }

    /// A pool of this size whose tables are no smaller than wished for is kept.
    fn suits(&self, found: &Geometry) -> bool {
        found.file_bytes == self.geometry.file_bytes
            && (self.options.l1_entries.is_none() || found.l1_entries == self.geometry.l1_entries)
            && found.l2_records >= self.geometry.l2_records
    }

    /// Becomes a member of the file, with the lock descriptions in `locks`.
    fn attach(
        &self,
        file: File,
        head: &Head,
        locks: &mut Option<(LockFile, LockFile)>,
        role: Role,
    ) -> Result<Step> {
        let mapping = Arc::new(Mapping::of(file.as_fd(), head.geometry.file_bytes)?);
        if !place::is_same_file(&file, &self.path) {
            return Ok(Step::Again);
        }
        let Some((life, _)) = locks.as_ref() else { return Ok(Step::Again) };
        let limit = self.options.disk_capacity_bytes;
        let Some(member) = members::join(&mapping, life, limit)? else {
            if self.alone {
                return self.unlink(&file, "all of its members died and left something behind");
            }
            let text = format!(
                "the pool {} has {MEMBERS_MAX} members already, and each engine and each of its \
                 workers is one: stop some, or give others another cache_dir",
                self.path.display()
            );
            return Err(Error::new(ErrorKind::NoSpace, text));
        };
        if self.place.incarnation()? != Some(head.incarnation) {
            self.place.set_incarnation(head.incarnation)?;
        }
        let Some((life, ctl)) = locks.take() else { return Ok(Step::Again) };
        let files = Files::new(file, life, ctl);
        let parts = (mapping, head.geometry, head.pool_id, member, files);
        let pool = Pool::assemble(parts, Some(self.path.clone()));
        pool.start_reserver(role)?;
        Ok(Step::Joined(pool))
    }

    /// Lets the caller save what only this pool has, then removes the pool.
    fn write_back(&self, file: File, head: &Head, before_recreate: BeforeRecreate) -> Result<()> {
        log::info!(
            "making the pool {} anew: it has {} bytes and {} L2 records, not {} and {}",
            self.path.display(),
            head.geometry.file_bytes,
            head.geometry.l2_records,
            self.geometry.file_bytes,
            self.geometry.l2_records
        );
        let path = self.place.lock_path();
        let mut locks = Some((LockFile::open(&path)?, LockFile::open(&path)?));
        let kept =
            file.try_clone().map_err(|error| Error::io("duplicating a descriptor", error))?;
        if let Step::Joined(pool) = self.attach(file, head, &mut locks, Role::Worker)? {
            if let Err(error) = before_recreate(&pool) {
                log::warn!("what the old pool had in memory only may be lost: {error}");
            }
            pool.leave();
        }
        self.unlink(&kept, "it is made anew").map(|_| ())
    }

    fn unlink(&self, file: &File, why: &str) -> Result<Step> {
        log::info!("removing the pool {}: {why}", self.path.display());
        place::unlink_same(file, &self.path)?;
        Ok(Step::Again)
    }

    /// Makes the file, complete but for members.
    fn create(&self) -> Result<()> {
        let file = place::create_pool_file(&self.path)?;
        let filled = self.fill(&file);
        if filled.is_err() {
            place::unlink_same(&file, &self.path)?;
        }
        filled
    }

    fn fill(&self, file: &File) -> Result<()> {
        if !flock_shared(file)? {
            return Ok(());
        }
        sys::file::set_len(file.as_fd(), self.geometry.file_bytes)?;
        let mapping = Mapping::of(file.as_fd(), self.geometry.data_offset)?;
        self.allocate_metadata(file, &mapping)?;
        initialise(&mapping, &self.geometry, &self.id, self.place.cache_dir.as_deref())
    }

    /// Until the metadata has memory of its own, touching it could be the process's end (SIGBUS).
    fn allocate_metadata(&self, file: &File, mapping: &Mapping) -> Result<()> {
        loop {
            let result = mapping.allocate(file.as_fd(), 0, self.geometry.data_offset);
            match result {
                Err(error) if error.kind() == ErrorKind::NoSpace => {
                    if !sweep::remove_idle(&self.place.ram_dir) {
                        return Err(self.no_space(&error));
                    }
                }
                result => return result,
            }
        }
    }

    fn dir_exists(&self) -> Result<bool> {
        Ok(sys::file::inode_of(self.path.parent().unwrap_or(&self.path))?.is_some())
    }

    fn no_space(&self, error: &Error) -> Error {
        let dir = self.place.ram_dir.display();
        Error::new(
            ErrorKind::NoSpace,
            format!(
                "no room in {dir} for the pool's metadata ({} bytes): {error}; free some of it, \
                 enlarge it (mount -o remount,size=..., docker --shm-size), or set another ram_dir",
                self.geometry.data_offset
            ),
        )
    }

    fn unreachable(&self) -> Error {
        Error::new(
            ErrorKind::Unavailable,
            format!(
                "other processes use {} with a pool that this process can't reach (not the one at \
                 {}): give all of them the same ram_dir (in containers, the same /dev/shm), or \
                 give this one another cache_dir",
                self.place.lock_dir.display(),
                self.path.display()
            ),
        )
    }

    fn other_format(&self, version: u32) -> Error {
        Error::new(
            ErrorKind::PoolIncompatible,
            format!(
                "the pool {} has format {version}, this LakeCache has format {FORMAT_VERSION}, and \
                 other processes use it: stop them, or set another cache_dir",
                self.path.display()
            ),
        )
    }

    fn warn_other_size(&self, found: &Geometry) {
        log::warn!(
            "the pool {} has {} bytes, as its creator set; this process's cpu_bytes = {} has no \
             effect",
            self.path.display(),
            found.file_bytes,
            self.options.cpu_bytes
        );
    }
}

fn used_privately(place: &Place) -> Error {
    Error::new(
        ErrorKind::Unavailable,
        format!(
            "another process uses {} for itself alone (a private pool): stop it, or set another \
             cache_dir",
            place.lock_dir.display()
        ),
    )
}

pub(super) fn sizes(options: &PoolOptions) -> Sizes {
    Sizes {
        cpu_bytes: options.cpu_bytes,
        transit_bytes: options.transit_bytes.max(DATA_BYTES_MIN),
        l1_entries: options.l1_entries,
        l2_records: options.l2_records,
        disk_capacity_bytes: options.disk_capacity_bytes,
        disk: options.cache_dir.is_some() || options.l2_records.is_some_and(|records| records > 0),
    }
}

/// Refuses what can never fit; what doesn't fit for now is put off piece by piece.
pub(super) fn check_fits(geometry: &Geometry, options: &PoolOptions) -> Result<()> {
    let bytes = geometry.file_bytes;
    let space = sys::limits::fs_space(&options.ram_dir)?.total;
    if space > 0 && bytes > space {
        return Err(Error::new(
            ErrorKind::NoSpace,
            format!(
                "cpu_bytes = {} can never fit: the file system of ram_dir {} has {space} bytes in \
                 all; lower cpu_bytes, enlarge it (mount -o remount,size=..., docker --shm-size), \
                 or set another ram_dir",
                options.cpu_bytes,
                options.ram_dir.display()
            ),
        ));
    }
    check_cgroup(bytes, options)
}

pub(super) fn check_cgroup(bytes: u64, options: &PoolOptions) -> Result<()> {
    match sys::limits::cgroup_limit() {
        Some(group) if bytes > group.limit => Err(Error::new(
            ErrorKind::NoSpace,
            format!(
                "cpu_bytes = {} can never fit: this container's memory limit is {} bytes; lower \
                 cpu_bytes or raise the limit",
                options.cpu_bytes, group.limit
            ),
        )),
        _ => Ok(()),
    }
}

/// Writes the header of a new, zeroed file and publishes it.
pub(super) fn initialise(
    mapping: &Mapping,
    geometry: &Geometry,
    id: &[u8; 16],
    cache_dir: Option<&Path>,
) -> Result<()> {
    use std::os::unix::ffi::OsStrExt;
    let header = Header::of(mapping);
    let path = cache_dir.map_or(&[] as &[u8], |dir| dir.as_os_str().as_bytes());
    if path.len() > CACHE_DIR_MAX {
        let text = format!("the path of cache_dir is longer than {CACHE_DIR_MAX} bytes");
        return Err(Error::new(ErrorKind::Config, text));
    }
    // SAFETY: nobody reads the geometry of a file that is not published; the creator is alone.
    unsafe { (&raw const header.geometry).cast_mut().write_volatile(*geometry) };
    for (cell, byte) in header.pool_id.iter().zip(id) {
        cell.store(*byte, Ordering::Relaxed);
    }
    for (cell, byte) in header.cache_dir.iter().zip(path) {
        cell.store(*byte, Ordering::Relaxed);
    }
    let length = u32::try_from(path.len()).unwrap_or(0);
    header.cache_dir_len.store(length, Ordering::Relaxed);
    let incarnation = u64::from_ne_bytes(sys::file::random_bytes());
    header.incarnation.store(incarnation, Ordering::Relaxed);
    header.mount_namespace.store(place::mount_namespace(), Ordering::Relaxed);
    header.version.store(FORMAT_VERSION, Ordering::Relaxed);
    header.roots.iter().for_each(super::TableRoot::clear);
    header.magic.store(MAGIC, Ordering::Release);
    Ok(())
}

/// Judges a pool file by its header, without mapping it: a short file can't be touched.
pub(super) fn read_header(file: &File) -> Result<Found> {
    let failed = |error| Error::io("reading a pool's header", error);
    let bytes = file.metadata().map_err(failed)?.len();
    if bytes < size_of::<Header>() as u64 {
        return Ok(Found::Unpublished);
    }
    let mut page = vec![0; size_of::<Header>()];
    file.read_exact_at(&mut page, 0).map_err(failed)?;
    Ok(Header::parse(&page, bytes))
}

impl Header {
    /// The header of a mapped file.
    pub(super) fn of(mapping: &Mapping) -> &Self {
        // SAFETY: `at` checks that the mapping is long enough; it is page-aligned, and all fields
        // that change after publication are atomics.
        unsafe { &*mapping.at(0, size_of::<Self>() as u64).cast() }
    }

    /// Judges a copy of the first page of a file of `file_bytes`.
    fn parse(page: &[u8], file_bytes: u64) -> Found {
        use std::os::unix::ffi::OsStringExt;
        assert!(page.len() >= size_of::<Self>());
        let mut aligned = Box::new(std::mem::MaybeUninit::<Self>::uninit());
        let size = size_of::<Self>();
        // SAFETY: both sides are at least a header long and do not overlap.
        unsafe { aligned.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(page.as_ptr(), size) };
        // SAFETY: every byte was written, and any bytes are a valid header: integers all through.
        let header = unsafe { aligned.assume_init() };
        let magic = header.magic.load(Ordering::Relaxed);
        let version = header.version.load(Ordering::Relaxed);
        if magic == 0 {
            return Found::Unpublished;
        }
        let path_len = header.cache_dir_len.load(Ordering::Relaxed) as usize;
        let sound = header.geometry.is_sound(file_bytes) && path_len <= CACHE_DIR_MAX;
        if magic != MAGIC || version != FORMAT_VERSION || !sound {
            return Found::OtherFormat(version);
        }
        let load = |cell: &std::sync::atomic::AtomicU8| cell.load(Ordering::Relaxed);
        let path: Vec<u8> = header.cache_dir[..path_len].iter().map(load).collect();
        Found::Pool(Box::new(Head {
            pool_id: std::array::from_fn(|n| load(&header.pool_id[n])),
            incarnation: header.incarnation.load(Ordering::Relaxed),
            geometry: header.geometry,
            mount_namespace: header.mount_namespace.load(Ordering::Relaxed),
            cache_dir: (path_len > 0).then(|| std::ffi::OsString::from_vec(path).into()),
        }))
    }
}

impl Files {
    pub(super) fn new(file: File, life: LockFile, ctl: LockFile) -> ManuallyDrop<Self> {
        let in_child = sys::fork::close_in_child(file.as_fd());
        ManuallyDrop::new(Self { _in_child: in_child, file, life, ctl })
    }
}
