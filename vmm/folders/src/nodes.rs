//! The files that a guest knows, each counted as the guest counts its lookups of it.
//!
//! ```text
//! Held (O_PATH descriptor) ── park: room for another ──> Parked (directory, name, what it was)
//!       ^──────────────── wake: a request names it ───────────┘
//! ```
//! What the guest has open is always held. What is found in a parked file's place is that file only
//! if device, number and time of birth are the same; else the guest has to look its name up again
//! (ESTALE).

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Stat, StatxFlags, statx};
use rustix::io::Errno;

use crate::Limits;
use crate::host::{self, Ident, is_open};
use crate::table::Table;

/// The number of the folder itself (`FUSE_ROOT_ID`).
pub const ROOT: u64 = 1;

/// Directories above a parked file that are looked through for it.
const DEPTH_MAX: usize = 256;

/// A file of the folder, held by an `O_PATH` descriptor, so that it stays the same file whatever
/// happens to its name.
#[derive(Debug)]
pub struct Node {
    pub fd: OwnedFd,
    pub ident: Ident,
    pub kind: FileType,
    /// How often the guest was told of it, less what it has forgotten.
    lookups: u64,
    /// The content that the guest may have in its cache, by when it was changed and its length.
    pub cached: Option<Content>,
    /// How often the guest has it open.
    pub opens: usize,
    place: Option<Place>,
    /// Whether a request named it since the last look for one to park.
    is_recent: bool,
}

/// Where a file was seen last: the number of a directory, and a name.
#[derive(Clone, Debug)]
struct Place {
    dir: u64,
    name: Box<[u8]>,
}

impl Place {
    fn new((dir, name): (u64, &[u8])) -> Self {
        Self { dir, name: name.into() }
    }
}

/// A file that the guest knows and that is not held.
#[derive(Debug)]
struct Parked {
    ident: Ident,
    born: Birth,
    lookups: u64,
    cached: Option<Content>,
    place: Place,
}

#[derive(Debug)]
enum Known {
    Held(Node),
    Parked(Parked),
}

/// When a file was made: two files with one number after another have two births.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Birth(i64, u32);

/// The birth of a file that has a name; `None` where the host does not tell.
fn birth(held: impl AsFd) -> Option<Birth> {
    let wanted = StatxFlags::BTIME | StatxFlags::NLINK;
    let told = statx(held, c"", AtFlags::EMPTY_PATH, wanted).ok()?;
    let told_all = StatxFlags::from_bits_retain(told.stx_mask).contains(wanted);
    let has_name = told_all && told.stx_nlink > 0;
    has_name.then_some(Birth(told.stx_btime.tv_sec, told.stx_btime.tv_nsec))
}

/// When a file was changed, and its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Content(i64, u64, i64);

impl Content {
    pub fn of(stat: &Stat) -> Self {
        Self(stat.st_mtime, stat.st_mtime_nsec, stat.st_size)
    }
}

impl Node {
    pub fn new(fd: OwnedFd, stat: &Stat) -> Self {
        let kind = FileType::from_raw_mode(stat.st_mode);
        Self {
            fd,
            ident: Ident::of(stat),
            kind,
            lookups: 0,
            cached: None,
            opens: 0,
            place: None,
            is_recent: true,
        }
    }

    pub fn is_dir(&self) -> bool {
        self.kind == FileType::Directory
    }

    pub fn is_device(&self) -> bool {
        matches!(self.kind, FileType::BlockDevice | FileType::CharacterDevice)
    }
}

/// All of them, by the guest's number and by what they are.
#[derive(Debug)]
pub struct Nodes {
    table: Table<Known>,
    numbers: HashMap<Ident, u64>,
    /// Devices that were found to hold files.
    devices: Vec<u64>,
    held: usize,
    held_max: usize,
    /// The slot from which the next file to park is looked for.
    hand: usize,
    /// What the request that is carried out names: that stays held.
    named: Vec<u64>,
}

impl Nodes {
    /// # Errors
    /// The host's.
    pub fn new(root: Node, limits: &Limits) -> Result<Self, Errno> {
        let mut table = Table::new(limits.nodes_max.max(1));
        let (ident, devices) = (root.ident, vec![root.ident.dev]);
        let number = table.insert(Known::Held(root))?;
        Ok(Self {
            table,
            numbers: HashMap::from([(ident, number)]),
            devices,
            held: 1,
            held_max: limits.held_max.max(1),
            hand: 0,
            named: Vec::new(),
        })
    }

    /// # Errors
    /// ESTALE for a number that is nobody's, or of a file that is not held.
    pub fn get(&self, number: u64) -> Result<&Node, Errno> {
        match self.table.get(number) {
            Some(Known::Held(node)) => Ok(node),
            _ => Err(Errno::STALE),
        }
    }

    /// # Errors
    /// As of [`Self::get`].
    pub fn get_mut(&mut self, number: u64) -> Result<&mut Node, Errno> {
        match self.table.get_mut(number) {
            Some(Known::Held(node)) => Ok(node),
            _ => Err(Errno::STALE),
        }
    }

    /// # Errors
    /// ENOTDIR where it is none.
    pub fn dir(&self, number: u64) -> Result<&Node, Errno> {
        self.get(number).and_then(|node| if node.is_dir() { Ok(node) } else { Err(Errno::NOTDIR) })
    }

    /// A request is carried out now.
    pub fn begin(&mut self) {
        self.named.clear();
    }

    /// The request names `number`, which is held from now on until the next [`Self::begin`].
    ///
    /// # Errors
    /// ESTALE where the file is not where it was, ENFILE where there is no room for it.
    pub fn wake(&mut self, number: u64) -> Result<(), Errno> {
        self.named.push(number);
        match self.table.get_mut(number) {
            Some(Known::Held(node)) => {
                node.is_recent = true;
                return Ok(());
            }
            Some(Known::Parked(_)) => {}
            // Who uses it says so.
            None => return Ok(()),
        }
        self.make_room()?;
        let file = self.find_again(number)?;
        let stat = rustix::fs::fstat(&file)?;
        self.unpark(number, Node::new(file, &stat));
        Ok(())
    }

    /// The file of a number that is parked, from the nearest directory above it that is held.
    fn find_again(&self, number: u64) -> Result<OwnedFd, Errno> {
        let mut way = Vec::new();
        let mut at = number;
        let mut dir = loop {
            match self.table.get(at).ok_or(Errno::STALE)? {
                Known::Held(node) => break node.fd.try_clone().map_err(|_| Errno::NFILE)?,
                Known::Parked(parked) if way.len() < DEPTH_MAX => {
                    way.push(parked);
                    at = parked.place.dir;
                }
                Known::Parked(_) => return Err(Errno::STALE),
            }
        };
        for parked in way.into_iter().rev() {
            let found = host::hold(&dir, &parked.place.name).map_err(|errno| match errno {
                Errno::NOENT | Errno::NOTDIR => Errno::STALE,
                errno => errno,
            })?;
            let stat = rustix::fs::fstat(&found)?;
            let ident = Ident { is_fixed: parked.ident.is_fixed, ..Ident::of(&stat) };
            if !parked.is(&found, ident) {
                return Err(Errno::STALE);
            }
            dir = found;
        }
        Ok(dir)
    }

    /// Holds a file that was parked.
    fn unpark(&mut self, number: u64, mut node: Node) {
        let Some(known) = self.table.get_mut(number) else { return };
        if let Known::Parked(parked) = known {
            node.ident = parked.ident;
            node.lookups = parked.lookups;
            node.cached = parked.cached;
            node.place = Some(parked.place.clone());
            *known = Known::Held(node);
            self.held += 1;
        }
    }

    /// Before a file is made that is to be one of them.
    ///
    /// # Errors
    /// ENFILE where there is no room for it.
    pub fn check_room(&mut self) -> Result<(), Errno> {
        if self.table.is_full() { Err(Errno::NFILE) } else { self.make_room() }
    }

    /// Parks a file where as many are held as may be: one that is not open, and that no request
    /// named for long.
    fn make_room(&mut self) -> Result<(), Errno> {
        if self.held < self.held_max {
            return Ok(());
        }
        // In the second round nothing is recent any more.
        for _ in 0..self.table.slots() * 2 {
            self.hand = (self.hand + 1) % self.table.slots();
            let Some((number, known)) = self.table.in_slot(self.hand) else { continue };
            let Known::Held(node) = &mut *known else { continue };
            if std::mem::take(&mut node.is_recent) || node.opens > 0 || number == ROOT {
                continue;
            }
            if self.named.contains(&number) {
                continue;
            }
            let Some(parked) = node.park() else { continue };
            *known = Known::Parked(parked);
            self.held -= 1;
            return Ok(());
        }
        Err(Errno::NFILE)
    }

    /// Whether so much is held that what need not be is not.
    pub fn is_crowded(&self) -> bool {
        self.held >= self.held_max.min(self.table.max()) / 2
    }

    /// The number of the file that is `ident`, if it is held; the guest is told of it once more, at
    /// a place if that is known.
    pub fn find(&mut self, ident: Ident, place: Option<(u64, &[u8])>) -> Option<u64> {
        let number = *self.numbers.get(&ident)?;
        let Some(Known::Held(node)) = self.table.get_mut(number) else { return None };
        node.lookups = node.lookups.saturating_add(1);
        node.is_recent = true;
        if let Some(place) = place {
            node.place = Some(Place::new(place));
        }
        Some(number)
    }

    /// The number of `node`, which the guest is told of.
    ///
    /// # Errors
    /// ENFILE where there are too many, EACCES for what is not a file system of files.
    pub fn add(&mut self, mut node: Node, place: Option<(u64, &[u8])>) -> Result<u64, Errno> {
        if let Some(number) = self.find(node.ident, place) {
            return Ok(number);
        }
        self.check_device(&node)?;
        self.make_room()?;
        let ident = node.ident;
        if let Some(number) = self.numbers.get(&ident).copied() {
            let is_it = match self.table.get(number) {
                Some(Known::Parked(parked)) => parked.is(&node.fd, ident),
                _ => false,
            };
            if is_it {
                self.unpark(number, node);
                return self.find(ident, place).ok_or(Errno::STALE);
            }
            // The number is another file's now, and the one that had it is gone.
            self.numbers.remove(&ident);
        }
        node.lookups = 1;
        node.place = place.map(Place::new);
        let number = self.table.insert(Known::Held(node))?;
        self.held += 1;
        self.numbers.insert(ident, number);
        Ok(number)
    }

    /// The file that is `ident` is at another place now.
    pub fn moved(&mut self, ident: Ident, place: (u64, &[u8])) {
        let Some(number) = self.numbers.get(&ident) else { return };
        match self.table.get_mut(*number) {
            Some(Known::Held(node)) => node.place = Some(Place::new(place)),
            Some(Known::Parked(parked)) => parked.place = Place::new(place),
            None => {}
        }
    }

    fn check_device(&mut self, node: &Node) -> Result<(), Errno> {
        let device = node.ident.dev;
        if self.devices.contains(&device) {
            return Ok(());
        }
        if !is_open(&node.fd)? {
            return Err(Errno::ACCESS);
        }
        self.devices.push(device);
        Ok(())
    }

    /// Those that are held.
    pub fn held(&self) -> impl Iterator<Item = &Node> {
        self.table.values().filter_map(|known| match known {
            Known::Held(node) => Some(node),
            Known::Parked(_) => None,
        })
    }

    /// Lets go of all.
    pub fn forget_all(&mut self) {
        self.table.clear();
        self.numbers.clear();
        self.held = 0;
    }

    /// Whether the file is one of those that are held.
    pub fn holds(&self, ident: Ident) -> bool {
        self.numbers.get(&ident).is_some_and(|number| self.get(*number).is_ok())
    }

    /// The guest has forgotten `count` of its lookups.
    pub fn forget(&mut self, number: u64, count: u64) -> Forgotten {
        let Some(known) = self.table.get_mut(number).filter(|_| number != ROOT) else {
            return Forgotten::No;
        };
        let (lookups, ident) = match known {
            Known::Held(node) => (&mut node.lookups, node.ident),
            Known::Parked(parked) => (&mut parked.lookups, parked.ident),
        };
        *lookups = lookups.saturating_sub(count);
        if *lookups > 0 {
            return Forgotten::No;
        }
        if self.numbers.get(&ident) == Some(&number) {
            self.numbers.remove(&ident);
        }
        match self.table.remove(number) {
            Some(Known::Held(node)) => {
                self.held -= 1;
                Forgotten::LetGo(node)
            }
            _ => Forgotten::Parked,
        }
    }
}

/// What became of a file of which lookups were forgotten.
#[derive(Debug)]
pub enum Forgotten {
    /// The guest knows it, or never did.
    No,
    /// It is not known any more, and was held.
    LetGo(Node),
    /// It is not known any more.
    Parked,
}

impl Parked {
    /// Whether `held`, which is `ident`, is that file.
    fn is(&self, held: impl AsFd, ident: Ident) -> bool {
        self.ident == ident && birth(held) == Some(self.born)
    }
}

impl Node {
    /// The same, not held; `None` for one that could not be found again.
    fn park(&self) -> Option<Parked> {
        let (place, born) = (self.place.clone()?, birth(&self.fd)?);
        let (ident, lookups, cached) = (self.ident, self.lookups, self.cached);
        Some(Parked { ident, born, lookups, cached, place })
    }
}
