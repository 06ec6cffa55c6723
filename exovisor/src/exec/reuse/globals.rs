//! Mutable globals and what they began with.

use wasmtime::{Global, Instance, ModuleExport, Result, Store, Val};

/// Those of one instance.
pub(crate) struct Globals(Vec<(Global, Val)>);

impl Globals {
    /// Reads those of an instance in which nothing has run yet.
    pub fn read<T>(exports: &[ModuleExport], instance: &Instance, store: &mut Store<T>) -> Self {
        let mut globals = Vec::with_capacity(exports.len());
        for export in exports {
            let global = instance.get_module_export(&mut *store, export);
            if let Some(global) = global.and_then(wasmtime::Extern::into_global) {
                globals.push((global, global.get(&mut *store)));
            }
        }
        Self(globals)
    }

    /// Makes them as they were.
    ///
    /// # Errors
    /// When the store is another.
    pub fn reset<T>(&self, store: &mut Store<T>) -> Result<()> {
        self.0.iter().try_for_each(|(global, value)| global.set(&mut *store, *value))
    }
}
