//! Every target over its seeds and a fixed number of their mutations.

use exocell_fuzz::mutate::Mutator;
use exocell_fuzz::{TARGETS, target};

/// Variants of each target's seeds.
const VARIANTS: usize = 1000;

fn survives(name: &str) {
    let target = target(name).expect("a target");
    let seeds = (target.seeds)();
    assert!(!seeds.is_empty(), "{name} has no seeds");
    (target.run)(&[]);
    seeds.iter().for_each(|seed| (target.run)(seed));
    let mut mutator = Mutator::new(seeds);
    (0..VARIANTS).for_each(|_| (target.run)(&mutator.next_variant()));
}

macro_rules! smoke {
    ($($name:ident)*) => {
        $(#[test] fn $name() { survives(stringify!($name)); })*

        #[test]
        fn every_target_is_run() {
            let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
            assert_eq!(names, [$(stringify!($name)),*]);
        }
    };
}

smoke! {
    vhost_user virtqueues vsock pager_ring packets guard names folder agent_frames agent_client
    image_layer image_archive image_config dockerfile image_tree session_files module
    isolate_threads
    isolate_hostcalls isolate_programs isolate_service caps_table caps_flags
}

#[test]
fn variants_differ_and_are_the_same_every_time() {
    let seeds = vec![b"one seed".to_vec(), b"another".to_vec()];
    let make = || {
        let mut mutator = Mutator::new(seeds.clone());
        (0..100).map(|_| mutator.next_variant()).collect::<Vec<_>>()
    };
    let variants = make();
    assert_eq!(variants, make());
    let distinct: std::collections::BTreeSet<_> = variants.iter().collect();
    assert!(distinct.len() > 80, "only {} of 100 differ", distinct.len());
}
