//! What a helper is to start, as bytes: of this program for this program.

use std::ffi::CString;

use super::Program;
use crate::capabilities::Sets;
use crate::limits::Limit;
use crate::mounts::InChild;

/// A program, and what belongs to its process.
pub(super) struct Order {
    pub program: Program,
    pub is_tty: bool,
    /// What it mounts as the first process of its namespaces; `None` beside others.
    pub mounts: Option<Vec<InChild>>,
}

/// The bytes of `program`, and the rest of an [`Order`].
pub(super) fn write(program: &Program, is_tty: bool, mounts: Option<&[InChild]>) -> Vec<u8> {
    let mut to = Writer(Vec::new());
    to.string(&program.path);
    to.strings(&program.args);
    to.strings(&program.env);
    to.string(&program.cwd);
    to.numbers([program.uid.into(), program.gid.into(), program.umask.into()]);
    to.list(&program.groups, |to, group| to.number((*group).into()));
    to.list(&program.limits, |to, limit| {
        to.numbers([limit.number.into(), limit.soft, limit.hard]);
    });
    to.list(program.capabilities.as_slice(), |to, sets| {
        let Sets { bounding, effective, permitted, inheritable, ambient } = *sets;
        to.numbers([bounding, effective, permitted, inheritable, ambient]);
    });
    to.list(&program.filter, |to, instruction| to.number(*instruction));
    to.numbers([program.no_new_privileges.into(), program.init.into(), is_tty.into()]);
    to.list(mounts.as_slice(), |to, mounts| to.list(mounts, Writer::mount));
    to.0
}

/// What [`write()`] made; `None` of other bytes.
pub(super) fn read(bytes: &[u8]) -> Option<Order> {
    let mut from = Reader(bytes);
    let program = Program {
        path: from.string()?,
        args: from.list(Reader::string)?,
        env: from.list(Reader::string)?,
        cwd: from.string()?,
        uid: from.small()?,
        gid: from.small()?,
        umask: from.small()?,
        groups: from.list(Reader::small)?,
        limits: from.list(|from| {
            Some(Limit { number: from.small()?, soft: from.number()?, hard: from.number()? })
        })?,
        capabilities: from.list(Reader::sets)?.pop(),
        filter: from.list(Reader::number)?,
        no_new_privileges: from.number()? != 0,
        init: from.number()? != 0,
    };
    let is_tty = from.number()? != 0;
    let mounts = from.list(|from| from.list(Reader::mount))?.pop();
    from.0.is_empty().then_some(Order { program, is_tty, mounts })
}

struct Writer(Vec<u8>);

impl Writer {
    fn number(&mut self, number: u64) {
        self.0.extend(number.to_ne_bytes());
    }

    fn numbers<const N: usize>(&mut self, numbers: [u64; N]) {
        numbers.into_iter().for_each(|number| self.number(number));
    }

    fn string(&mut self, string: &CString) {
        self.number(string.as_bytes().len() as u64);
        self.0.extend(string.as_bytes());
    }

    fn list<T>(&mut self, items: &[T], mut each: impl FnMut(&mut Self, &T)) {
        self.number(items.len() as u64);
        items.iter().for_each(|item| each(self, item));
    }

    fn strings(&mut self, strings: &[CString]) {
        self.list(strings, Self::string);
    }

    fn mount(&mut self, mount: &InChild) {
        match mount {
            InChild::Mount { source, target, kind, flags, data } => {
                self.number(0);
                [source, target, kind, data].into_iter().for_each(|string| self.string(string));
                self.number(*flags);
            }
            InChild::Mask(target) => {
                self.number(1);
                self.string(target);
            }
            InChild::ReadOnly { target, flags } => {
                self.number(2);
                self.string(target);
                self.number(*flags);
            }
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn number(&mut self) -> Option<u64> {
        let (number, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_ne_bytes(*number))
    }

    fn small(&mut self) -> Option<u32> {
        u32::try_from(self.number()?).ok()
    }

    fn string(&mut self) -> Option<CString> {
        let length = usize::try_from(self.number()?).ok()?;
        let (string, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        CString::new(string).ok()
    }

    fn list<T>(&mut self, mut each: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let count = self.number()?;
        (0..count).map(|_| each(self)).collect()
    }

    fn sets(&mut self) -> Option<Sets> {
        Some(Sets {
            bounding: self.number()?,
            effective: self.number()?,
            permitted: self.number()?,
            inheritable: self.number()?,
            ambient: self.number()?,
        })
    }

    fn mount(&mut self) -> Option<InChild> {
        match self.number()? {
            0 => Some(InChild::Mount {
                source: self.string()?,
                target: self.string()?,
                kind: self.string()?,
                data: self.string()?,
                flags: self.number()?,
            }),
            1 => Some(InChild::Mask(self.string()?)),
            2 => Some(InChild::ReadOnly { target: self.string()?, flags: self.number()? }),
            _ => None,
        }
    }
}
