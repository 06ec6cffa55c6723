use super::*;
use crate::{FolderScope, NetworkScope, Protocol};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;

fn memory(bytes: u64) -> Capability {
    Capability::new("memory", "cell", Kind::Memory, Rights::USE, Scope::Whole, Quota(bytes))
}

fn folder(host: &str, rights: Rights) -> Capability {
    let scope = Scope::Folder(FolderScope { host: host.into(), guest: "/src".into() });
    Capability::new("folder:/src", "cell", Kind::Folder, rights, scope, Quota::UNCOUNTED)
}

fn same(rights: Rights) -> Derivation<'static> {
    Derivation { name: "child", holder: "isolate", rights, scope: None, quota: None }
}

#[test]
fn a_table_is_bounded() {
    let mut table = Table::new(2);
    let first = table.insert(memory(1)).unwrap();
    table.derive(first, same(Rights::USE)).unwrap();
    assert_eq!(table.insert(memory(1)), Err(TableError::Full { capacity: 2 }));
    assert_eq!(table.derive(first, same(Rights::USE)), Err(TableError::Full { capacity: 2 }));
    table.revoke(first).unwrap();
    assert!(table.is_empty());
    assert!(table.insert(memory(1)).is_ok());
}

#[test]
fn a_handle_of_an_earlier_life_is_dead() {
    let mut table = Table::new(1);
    let old = table.insert(memory(1)).unwrap();
    table.revoke(old).unwrap();
    let new = table.insert(memory(2)).unwrap();
    assert_eq!(old.slot(), new.slot());
    assert_eq!(table.get(old).unwrap_err(), TableError::NotPresent { handle: old });
    assert_eq!(table.revoke(old).unwrap_err(), TableError::NotPresent { handle: old });
    assert!(table.get(new).is_ok());
}

#[test]
fn forged_handles_name_nothing() {
    let mut table = Table::new(4);
    table.insert(memory(1)).unwrap();
    for raw in [0, 1, u64::MAX, 1 << 32 | 9, 2 << 32] {
        assert!(table.get(Handle::from_raw(raw)).is_err(), "{raw:#x}");
    }
}

#[test]
fn a_slot_whose_generations_are_used_up_is_retired() {
    let mut table = Table::new(1);
    let handle = table.insert(memory(1)).unwrap();
    table.slots[0].generation = u32::MAX;
    table.revoke(Handle::new(handle.slot(), u32::MAX)).unwrap();
    assert_eq!(table.insert(memory(1)), Err(TableError::Full { capacity: 1 }));
}

#[test]
fn the_kind_must_match() {
    let mut table = Table::new(1);
    let handle = table.insert(memory(1)).unwrap();
    let error = table.check(handle, Kind::Folder, Rights::READ, Request::Whole).unwrap_err();
    assert_eq!(
        error,
        TableError::WrongKind { handle, expected: Kind::Folder, found: Kind::Memory }
    );
}

#[test]
fn a_denial_names_capability_holder_and_rule() {
    let mut table = Table::new(1);
    let handle = table.insert(folder("/tenant/src", Rights::READ)).unwrap();
    let write = table.check(handle, Kind::Folder, Rights::WRITE, Request::Whole).unwrap_err();
    assert_eq!(
        write.to_string(),
        "capability `folder:/src` of cell refuses this: it has the rights read, not write"
    );
    let outside = Request::Path(Path::new("/tenant/srcs"));
    let outside = table.check(handle, Kind::Folder, Rights::READ, outside).unwrap_err();
    assert!(outside.to_string().contains("/tenant/srcs is outside /tenant/src"), "{outside}");
}

#[test]
fn a_path_that_climbs_is_outside() {
    let mut table = Table::new(1);
    let handle = table.insert(folder("/tenant/src", Rights::READ)).unwrap();
    let ask =
        |path| table.check(handle, Kind::Folder, Rights::READ, Request::Path(Path::new(path)));
    assert!(ask("/tenant/src/lib/a.rs").is_ok());
    for path in ["/tenant/src/../secret", "src", "/tenant", "/"] {
        assert!(ask(path).is_err(), "{path}");
    }
    assert!(table.insert(folder("/tenant/../etc", Rights::READ)).is_err());
}

#[test]
fn network_requests_need_the_right_and_the_rule() {
    let scope = NetworkScope {
        connect: vec!["*.example.org:443".parse().unwrap()],
        listen: vec!["8080".parse().unwrap()],
        ..NetworkScope::default()
    };
    let rights = scope.rights();
    let network = Capability::new(
        "network",
        "cell",
        Kind::Network,
        rights,
        Scope::Network(scope),
        Quota::UNCOUNTED,
    );
    let mut table = Table::new(1);
    let handle = table.insert(network).unwrap();
    let ask = |rights, request| table.check(handle, Kind::Network, rights, request).is_ok();
    assert!(ask(Rights::CONNECT, Request::Peer(Protocol::Tcp, "a.example.org", 443)));
    assert!(!ask(Rights::CONNECT, Request::Peer(Protocol::Tcp, "a.example.org", 80)));
    assert!(!ask(Rights::CONNECT, Request::Peer(Protocol::Tcp, "example.com", 443)));
    assert!(ask(Rights::LISTEN, Request::Port(8080)));
    assert!(!ask(Rights::LISTEN, Request::Peer(Protocol::Tcp, "a.example.org", 443)));
    assert!(!ask(Rights::RESOLVE, Request::Name("a.example.org")));
}

#[test]
fn empty_lists_mean_nothing() {
    let names = Scope::Names(Default::default());
    let device =
        Capability::new("device", "cell", Kind::Device, Rights::USE, names, Quota::UNCOUNTED);
    let mut table = Table::new(1);
    let handle = table.insert(device).unwrap();
    assert!(table.check(handle, Kind::Device, Rights::USE, Request::Name("gpu")).is_err());
}

#[test]
fn invoke_does_not_begin_what_is_denied() {
    let mut table = Table::new(1);
    let handle = table.insert(memory(10)).unwrap();
    let run = |amount| {
        table
            .invoke(handle, Kind::Memory, Rights::USE, Request::Amount(amount), |held| held.quota())
    };
    assert_eq!(run(10), Ok(Quota(10)));
    assert!(run(11).is_err());
}

#[test]
fn derived_scope_rights_and_quota_must_shrink() {
    let mut table = Table::new(8);
    let source = table.insert(folder("/a", Rights::READ)).unwrap();
    assert!(table.derive(source, same(Rights::READ | Rights::WRITE)).is_err());
    let scope =
        |host: &str| Some(Scope::Folder(FolderScope { host: host.into(), guest: "/x".into() }));
    assert!(table.derive(source, Derivation { scope: scope("/b"), ..same(Rights::READ) }).is_err());
    assert!(
        table.derive(source, Derivation { scope: scope("/a/../b"), ..same(Rights::READ) }).is_err()
    );
    assert!(
        table
            .derive(source, Derivation { scope: Some(Scope::Whole), ..same(Rights::READ) })
            .is_err()
    );
    assert!(
        table.derive(source, Derivation { scope: scope("/a/b"), ..same(Rights::READ) }).is_ok()
    );
    let limited = table.insert(memory(10)).unwrap();
    assert!(
        table.derive(limited, Derivation { quota: Some(Quota(11)), ..same(Rights::USE) }).is_err()
    );
    assert!(
        table.derive(limited, Derivation { quota: Some(Quota(9)), ..same(Rights::USE) }).is_ok()
    );
}

#[test]
fn revoking_turns_off_tokens_already_handed_out() {
    let mut table = Table::new(8);
    let root = table.insert(folder("/a", Rights::READ)).unwrap();
    let child = table.derive(root, same(Rights::READ)).unwrap();
    let tokens = [root, child].map(|handle| table.get(handle).unwrap().live());
    let ended = table.revoke(root).unwrap();
    assert_eq!(ended.iter().map(|ended| ended.handle).collect::<Vec<_>>(), [root, child]);
    assert!(tokens.iter().all(|token| !token.is_live()));
}

/// One random step; handles are picked by index among all ever given out, dead ones too.
#[derive(Clone, Debug)]
enum Step {
    Insert { rights: u32, quota: u64 },
    Derive { from: usize, rights: u32, quota: u64 },
    Revoke { which: usize },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        1 => (0u32..128, 0u64..16).prop_map(|(rights, quota)| Step::Insert { rights, quota }),
        5 => (any::<usize>(), 0u32..128, 0u64..16).prop_map(|(from, rights, quota)| Step::Derive { from, rights, quota }),
        1 => any::<usize>().prop_map(|which| Step::Revoke { which }),
    ]
}

/// A plain model beside the table: who is alive, and who came from whom.
#[derive(Default)]
struct Model {
    all: Vec<Handle>,
    alive: BTreeMap<Handle, (Option<Handle>, Rights, u64)>,
}

impl Model {
    fn pick(&self, index: usize) -> Handle {
        self.all.get(index % self.all.len().max(1)).copied().unwrap_or(Handle::NULL)
    }

    fn add(&mut self, handle: Handle, parent: Option<Handle>, rights: Rights, quota: u64) {
        assert!(!self.all.contains(&handle), "{handle} was given out twice");
        self.all.push(handle);
        self.alive.insert(handle, (parent, rights, quota));
    }

    fn subtree(&self, root: Handle) -> Vec<Handle> {
        let below = |handle: &Handle| {
            let mut next = Some(*handle);
            while let Some(at) = next {
                if at == root {
                    return true;
                }
                next = self.alive.get(&at).and_then(|(parent, ..)| *parent);
            }
            false
        };
        self.alive.keys().copied().filter(below).collect()
    }
}

fn apply(table: &mut Table, model: &mut Model, step: Step) {
    match step {
        Step::Insert { rights, quota } => {
            let rights = Rights::from_bits_truncate(rights);
            let capability =
                Capability::new("c", "h", Kind::Spawn, rights, Scope::Whole, Quota(quota));
            if let Ok(handle) = table.insert(capability) {
                model.add(handle, None, rights, quota);
            }
        }
        Step::Derive { from, rights, quota } => {
            let (from, rights) = (model.pick(from), Rights::from_bits_truncate(rights));
            let wish = Derivation { quota: Some(Quota(quota)), ..same(rights) };
            if let Ok(handle) = table.derive(from, wish) {
                let (_, parent_rights, parent_quota) = model.alive[&from];
                assert!(parent_rights.contains(rights) && quota <= parent_quota);
                model.add(handle, Some(from), rights, quota);
            }
        }
        Step::Revoke { which } => {
            let which = model.pick(which);
            let expected = model.subtree(which);
            let mut ended: Vec<_> =
                table.revoke(which).unwrap_or_default().iter().map(|ended| ended.handle).collect();
            ended.sort();
            assert_eq!(ended, expected);
            model.alive.retain(|handle, _| !expected.contains(handle));
        }
    }
}

proptest! {
    /// Rights and quotas never grow, dead handles stay dead, revoking reaches exactly the
    /// subtree, and the table never holds more than its capacity.
    #[test]
    fn the_table_agrees_with_the_model(steps in prop::collection::vec(step(), 0..200), capacity in 0u32..24) {
        let mut table = Table::new(capacity);
        let mut model = Model::default();
        for step in steps {
            apply(&mut table, &mut model, step);
            prop_assert!(table.len() <= capacity as usize);
            prop_assert_eq!(table.len(), model.alive.len());
            for handle in &model.all {
                prop_assert_eq!(table.get(*handle).is_ok(), model.alive.contains_key(handle));
            }
        }
    }

    #[test]
    fn no_raw_handle_panics(raw: u64) {
        let mut table = Table::new(4);
        let _ = table.insert(memory(1));
        let _ = table.check(Handle::from_raw(raw), Kind::Memory, Rights::USE, Request::Whole);
        let _ = table.derive(Handle::from_raw(raw), same(Rights::USE));
        let _ = table.revoke(Handle::from_raw(raw));
    }
}
