//! The table: bounded slots, each with a generation, and the tree of derivations.
//!
//! A slot lives like this:
//!
//! ```text
//!          insert, derive            revoke (it or an ancestor)
//!   free ------------------> held ------------------------------> free, next generation
//!    ^                                                              |
//!    |                                                              | generation used up
//!    +--------------------------------------------------------------+-------> retired
//! ```

use crate::capability::is_plain;
use crate::{Capability, Denial, Handle, Kind, Live, Quota, Request, Rights, Scope, TableError};

/// What a derived capability shall be.
#[derive(Clone, Debug)]
pub struct Derivation<'a> {
    /// Name of the new capability.
    pub name: &'a str,
    /// Who will hold it.
    pub holder: &'a str,
    /// Rights, all of them held by the parent.
    pub rights: Rights,
    /// Scope, within the parent's. `None` takes over the parent's.
    pub scope: Option<Scope>,
    /// Quota, at most the parent's: a ceiling, not a reservation. `None` takes over the parent's.
    pub quota: Option<Quota>,
}

/// A capability that a revocation ended, for whoever must act on a running cell.
#[derive(Clone, Debug)]
pub struct Revoked {
    /// Its handle, dead by now.
    pub handle: Handle,
    /// What it was.
    pub capability: Capability,
}

#[derive(Debug)]
struct Slot {
    generation: u32,
    held: Option<Capability>,
    children: Vec<Handle>,
}

/// The capabilities of the cells of one supervisor.
#[derive(Debug)]
pub struct Table {
    slots: Vec<Slot>,
    free: Vec<u32>,
    capacity: u32,
}

impl Table {
    /// The most slots a table can have.
    pub const CAPACITY_MAX: u32 = 1 << 16;

    /// An empty table with this many slots (at most [`Table::CAPACITY_MAX`]).
    #[must_use]
    pub fn new(capacity: u32) -> Self {
        Self { slots: Vec::new(), free: Vec::new(), capacity: capacity.min(Self::CAPACITY_MAX) }
    }

    /// Puts in a capability that comes from outside: the operator's grant.
    ///
    /// # Errors
    /// [`TableError::Full`]; [`TableError::Denied`] for a folder whose path is not plain.
    pub fn insert(&mut self, mut capability: Capability) -> Result<Handle, TableError> {
        if let Scope::Folder(folder) = &capability.scope
            && !is_plain(&folder.host)
        {
            return Err(denied(
                &capability,
                format!("{} is not a plain absolute path", folder.host.display()),
            ));
        }
        capability.parent = None;
        capability.live = Live::new();
        self.place(capability)
    }

    /// Makes a capability out of `parent` that gives the same or less.
    ///
    /// # Errors
    /// [`TableError::Denied`] names what would have grown; [`TableError::NotPresent`], [`TableError::Full`].
    pub fn derive(&mut self, parent: Handle, wish: Derivation<'_>) -> Result<Handle, TableError> {
        let from = self.get(parent)?;
        let scope = wish.scope.unwrap_or_else(|| from.scope.clone());
        let quota = wish.quota.unwrap_or(from.quota);
        if let Some(rule) = growth(from, wish.rights, &scope, quota) {
            return Err(denied(from, rule));
        }
        let mut child =
            Capability::new(wish.name, wish.holder, from.kind, wish.rights, scope, quota);
        child.parent = Some(parent);
        let child = self.place(child)?;
        self.slot_mut(parent)?.children.push(child);
        Ok(child)
    }

    /// Ends a capability and everything derived from it. Parents come before their children in
    /// the answer. Every [`Live`] token of the subtree is off when this returns.
    ///
    /// # Errors
    /// [`TableError::NotPresent`].
    pub fn revoke(&mut self, handle: Handle) -> Result<Vec<Revoked>, TableError> {
        let parent = self.get(handle)?.parent;
        if let Some(parent) = parent {
            self.slot_mut(parent)?.children.retain(|child| *child != handle);
        }
        let mut pending = vec![handle];
        let mut ended = Vec::new();
        while let Some(next) = pending.pop() {
            if let Some((capability, children)) = self.clear(next) {
                capability.live.end();
                pending.extend(children);
                ended.push(Revoked { handle: next, capability });
            }
        }
        Ok(ended)
    }

    /// The capability a handle names.
    ///
    /// # Errors
    /// [`TableError::NotPresent`].
    pub fn get(&self, handle: Handle) -> Result<&Capability, TableError> {
        let slot = self
            .slots
            .get(handle.slot() as usize)
            .filter(|slot| slot.generation == handle.generation());
        slot.and_then(|slot| slot.held.as_ref()).ok_or(TableError::NotPresent { handle })
    }

    /// The one question: does this handle allow this?
    ///
    /// # Errors
    /// [`TableError::NotPresent`], [`TableError::WrongKind`], or [`TableError::Denied`], which
    /// names the capability, its holder and the rule.
    pub fn check(
        &self,
        handle: Handle,
        kind: Kind,
        rights: Rights,
        request: Request<'_>,
    ) -> Result<&Capability, TableError> {
        let capability = self.get(handle)?;
        if capability.kind != kind {
            return Err(TableError::WrongKind { handle, expected: kind, found: capability.kind });
        }
        match capability.objection(rights, &request) {
            None => Ok(capability),
            Some(rule) => Err(denied(capability, rule)),
        }
    }

    /// Checks, then does `operation`.
    ///
    /// # Errors
    /// Those of [`Table::check`]; the operation is then not begun.
    pub fn invoke<T>(
        &self,
        handle: Handle,
        kind: Kind,
        rights: Rights,
        request: Request<'_>,
        operation: impl FnOnce(&Capability) -> T,
    ) -> Result<T, TableError> {
        self.check(handle, kind, rights, request).map(operation)
    }

    /// Finds a holder's capability by name.
    #[must_use]
    pub fn find(&self, holder: &str, name: &str) -> Option<Handle> {
        let mut all = self.iter();
        all.find(|(_, held)| held.holder == holder && held.name == name).map(|(handle, _)| handle)
    }

    /// Every capability, by slot.
    pub fn iter(&self) -> impl Iterator<Item = (Handle, &Capability)> {
        let slots = self.slots.iter().zip(0u32..);
        slots.filter_map(|(slot, index)| {
            Some((Handle::new(index, slot.generation), slot.held.as_ref()?))
        })
    }

    /// How many capabilities it holds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.iter().count()
    }

    /// Whether it holds none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.iter().next().is_none()
    }

    fn place(&mut self, capability: Capability) -> Result<Handle, TableError> {
        let index = match self.free.pop() {
            Some(index) => index,
            None => self.grow()?,
        };
        let full = TableError::Full { capacity: self.capacity };
        let slot = self.slots.get_mut(index as usize).ok_or(full)?;
        slot.held = Some(capability);
        Ok(Handle::new(index, slot.generation))
    }

    fn grow(&mut self) -> Result<u32, TableError> {
        let index = u32::try_from(self.slots.len()).ok().filter(|index| *index < self.capacity);
        let index = index.ok_or(TableError::Full { capacity: self.capacity })?;
        self.slots.push(Slot { generation: 1, held: None, children: Vec::new() });
        Ok(index)
    }

    fn slot_mut(&mut self, handle: Handle) -> Result<&mut Slot, TableError> {
        let slot = self.slots.get_mut(handle.slot() as usize);
        slot.filter(|slot| slot.generation == handle.generation())
            .ok_or(TableError::NotPresent { handle })
    }

    /// Empties one slot and starts its next life; a slot whose generations are used up stays empty.
    fn clear(&mut self, handle: Handle) -> Option<(Capability, Vec<Handle>)> {
        let slot = self.slot_mut(handle).ok()?;
        let capability = slot.held.take()?;
        let children = std::mem::take(&mut slot.children);
        if let Some(next) = slot.generation.checked_add(1) {
            slot.generation = next;
            self.free.push(handle.slot());
        }
        Some((capability, children))
    }
}

/// What would be more than the parent has, in words.
fn growth(from: &Capability, rights: Rights, scope: &Scope, quota: Quota) -> Option<String> {
    let more = rights - from.rights;
    if !more.is_empty() {
        return Some(format!("it has the rights {}, so {more} cannot be derived", from.rights));
    }
    if !from.scope.contains(scope) {
        return Some(format!("{scope} is not within {}", from.scope));
    }
    (quota > from.quota)
        .then(|| format!("its limit is {}, so {} cannot be derived", from.quota.0, quota.0))
}

fn denied(capability: &Capability, rule: String) -> TableError {
    let (name, holder) = (capability.name.clone(), capability.holder.clone());
    TableError::Denied(Box::new(Denial { capability: name, holder, rule }))
}

#[cfg(test)]
mod tests;
