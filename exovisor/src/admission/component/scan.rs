//! A component's structure, looked at before any of it is compiled.
//!
//! The engine makes one flat list of everything in a component, and what is instantiated twice is
//! in it twice: thirty components that each hold the next one twice become a billion. So it is
//! counted here what they become.

use super::types;
use crate::admission::complexity::Complexity;
use crate::admission::scan::{self, Shape, at_most, malformed};
use crate::admission::{AdmissionError, Requirement};
use crate::imports::interfaces;
use crate::policy::ModuleLimits;
use wasmparser::{
    ComponentAlias, ComponentExternalKind, ComponentInstance, ComponentOuterAliasKind,
    ComponentTypeRef, Encoding, Instance, Parser, Payload, SectionLimited,
};

/// What a component or module becomes when it is instantiated.
#[derive(Clone, Copy, Default)]
struct Cost {
    /// Instances of core modules.
    instances: u64,
    /// Definitions of all kinds.
    items: u64,
}

impl Cost {
    fn add(&mut self, other: Self) {
        self.instances = self.instances.saturating_add(other.instances);
        self.items = self.items.saturating_add(other.items);
    }
}

/// A component or module that is being read.
enum Level {
    Component(Inner),
    Module(Box<Shape>, Cost),
}

/// What a component has defined so far.
#[derive(Default)]
struct Inner {
    cost: Cost,
    /// Its index spaces of modules and components.
    modules: Vec<Cost>,
    components: Vec<Cost>,
}

struct Scan<'a> {
    binary: &'a [u8],
    limits: &'a ModuleLimits,
    levels: Vec<Level>,
    requirements: Vec<Requirement>,
    complexity: Complexity,
}

/// Reads a component and all modules and components in it once, and checks it against all limits.
/// Answers with what it imports.
///
/// # Errors
/// [`AdmissionError::TooLarge`], [`AdmissionError::Malformed`], and
/// [`AdmissionError::UnknownImport`] for what only another component could give it.
pub(crate) fn scan(
    binary: &[u8],
    limits: &ModuleLimits,
) -> Result<Vec<Requirement>, AdmissionError> {
    let mut scan = Scan {
        binary,
        limits,
        levels: Vec::new(),
        requirements: Vec::new(),
        complexity: Complexity::default(),
    };
    for payload in Parser::new(0).parse_all(binary) {
        scan.look(payload?)?;
    }
    Ok(scan.requirements)
}

impl Scan<'_> {
    fn look(&mut self, payload: Payload<'_>) -> Result<(), AdmissionError> {
        match payload {
            Payload::Version { encoding, .. } => self.begin(encoding),
            Payload::End(_) => self.end(),
            payload => match self.levels.last_mut() {
                Some(Level::Module(shape, cost)) => {
                    cost.items = cost.items.saturating_add(count(&payload));
                    scan::look(payload, self.limits, shape, &mut self.complexity)
                }
                Some(Level::Component(_)) => self.component(payload),
                None => Ok(()),
            },
        }
    }

    fn begin(&mut self, encoding: Encoding) -> Result<(), AdmissionError> {
        self.levels.push(match encoding {
            Encoding::Component => Level::Component(Inner::default()),
            Encoding::Module => {
                self.complexity.next_module();
                Level::Module(Box::default(), Cost { instances: 1, items: 1 })
            }
        });
        at_most("levels of components", self.levels.len(), self.limits.depth)
    }

    /// What was read becomes an entry of what it is in.
    fn end(&mut self) -> Result<(), AdmissionError> {
        let done = self.levels.pop();
        let outer = match self.levels.last_mut() {
            Some(Level::Component(outer)) => outer,
            _ => return self.check(done),
        };
        match done {
            Some(Level::Component(inner)) => outer.components.push(inner.cost),
            Some(Level::Module(shape, _)) if shape.is_threaded() => {
                return Err(malformed("a component's modules cannot share a memory with threads"));
            }
            Some(Level::Module(_, cost)) => outer.modules.push(cost),
            None => {}
        }
        Ok(())
    }

    fn check(&self, whole: Option<Level>) -> Result<(), AdmissionError> {
        let Some(Level::Component(Inner { cost, .. })) = whole else { return Ok(()) };
        let size = |count: u64| usize::try_from(count).unwrap_or(usize::MAX);
        at_most("instances", size(cost.instances), self.limits.instances)?;
        at_most("definitions in all instances", size(cost.items), self.limits.items)
    }

    fn component(&mut self, payload: Payload<'_>) -> Result<(), AdmissionError> {
        let count = count(&payload);
        at_most("entries of a section", count as usize, self.limits.entries as usize)?;
        let inner = self.innermost()?;
        inner.cost.items = inner.cost.items.saturating_add(count);
        match payload {
            Payload::ComponentTypeSection(section) => {
                let section = self.binary.get(section.range()).unwrap_or_default();
                match types::is_deeper(section, self.limits.depth)? {
                    true => Err(malformed("its types are nested too deep")),
                    false => Ok(()),
                }
            }
            Payload::InstanceSection(section) => self.instances(section),
            Payload::ComponentInstanceSection(section) => self.component_instances(section),
            Payload::ComponentAliasSection(section) => {
                section.into_iter().try_for_each(|alias| self.alias(&alias?))
            }
            Payload::ComponentImportSection(section) => {
                section.into_iter().try_for_each(|import| {
                    let import = import?;
                    self.import(import.name.name, import.ty)
                })
            }
            Payload::ComponentExportSection(section) => {
                section.into_iter().try_for_each(|export| {
                    let export = export?;
                    self.export(export.kind, export.index)
                })
            }
            _ => Ok(()),
        }
    }

    fn innermost(&mut self) -> Result<&mut Inner, AdmissionError> {
        match self.levels.last_mut() {
            Some(Level::Component(inner)) => Ok(inner),
            _ => Err(malformed("a section is outside of its component")),
        }
    }

    fn instances(
        &mut self,
        section: SectionLimited<'_, Instance<'_>>,
    ) -> Result<(), AdmissionError> {
        let inner = self.innermost()?;
        for instance in section {
            if let Instance::Instantiate { module_index, .. } = instance? {
                inner.cost.add(entry(&inner.modules, module_index)?);
            }
        }
        Ok(())
    }

    fn component_instances(
        &mut self,
        section: SectionLimited<'_, ComponentInstance<'_>>,
    ) -> Result<(), AdmissionError> {
        let inner = self.innermost()?;
        for instance in section {
            if let ComponentInstance::Instantiate { component_index, .. } = instance? {
                inner.cost.add(entry(&inner.components, component_index)?);
            }
        }
        Ok(())
    }

    /// Modules and components that have another name in here.
    fn alias(&mut self, alias: &ComponentAlias<'_>) -> Result<(), AdmissionError> {
        match alias {
            ComponentAlias::Outer { kind, count, index } => self.outer_alias(*kind, *count, *index),
            ComponentAlias::InstanceExport { kind, name, .. } if is_code(*kind) => {
                Err(unresolved(name, *kind))
            }
            _ => Ok(()),
        }
    }

    fn outer_alias(
        &mut self,
        kind: ComponentOuterAliasKind,
        count: u32,
        index: u32,
    ) -> Result<(), AdmissionError> {
        let level = self.levels.iter().rev().nth(count as usize);
        let Some(Level::Component(outer)) = level else {
            return Err(malformed("an alias leads out of the component"));
        };
        match kind {
            ComponentOuterAliasKind::CoreModule => {
                let cost = entry(&outer.modules, index)?;
                self.innermost()?.modules.push(cost);
            }
            ComponentOuterAliasKind::Component => {
                let cost = entry(&outer.components, index)?;
                self.innermost()?.components.push(cost);
            }
            _ => {}
        }
        Ok(())
    }

    /// An export is a new entry of what it exports.
    fn export(&mut self, kind: ComponentExternalKind, index: u32) -> Result<(), AdmissionError> {
        let inner = self.innermost()?;
        match kind {
            ComponentExternalKind::Module => inner.modules.push(entry(&inner.modules, index)?),
            ComponentExternalKind::Component => {
                inner.components.push(entry(&inner.components, index)?);
            }
            _ => {}
        }
        Ok(())
    }

    fn import(&mut self, name: &str, ty: ComponentTypeRef) -> Result<(), AdmissionError> {
        match ty {
            ComponentTypeRef::Module(_) => {
                return Err(unresolved(name, ComponentExternalKind::Module));
            }
            ComponentTypeRef::Component(_) => {
                return Err(unresolved(name, ComponentExternalKind::Component));
            }
            // Types alone are nothing that could be called.
            ComponentTypeRef::Type(_) => return Ok(()),
            _ => {}
        }
        if self.levels.len() == 1 {
            let import = interfaces::find(name);
            let module = name.split_once('/').map_or("", |(package, _)| package).to_owned();
            self.requirements.push(Requirement { module, name: name.to_owned(), import });
        }
        Ok(())
    }
}

/// How many entries a section has, where that is known at once.
fn count(payload: &Payload<'_>) -> u64 {
    u64::from(match payload {
        Payload::TypeSection(section) => section.count(),
        Payload::ImportSection(section) => section.count(),
        Payload::FunctionSection(section) => section.count(),
        Payload::TableSection(section) => section.count(),
        Payload::MemorySection(section) => section.count(),
        Payload::GlobalSection(section) => section.count(),
        Payload::ExportSection(section) => section.count(),
        Payload::ElementSection(section) => section.count(),
        Payload::DataSection(section) => section.count(),
        Payload::CoreTypeSection(section) => section.count(),
        Payload::ComponentTypeSection(section) => section.count(),
        Payload::InstanceSection(section) => section.count(),
        Payload::ComponentInstanceSection(section) => section.count(),
        Payload::ComponentAliasSection(section) => section.count(),
        Payload::ComponentCanonicalSection(section) => section.count(),
        Payload::ComponentImportSection(section) => section.count(),
        Payload::ComponentExportSection(section) => section.count(),
        _ => 0,
    })
}

fn entry(entries: &[Cost], index: u32) -> Result<Cost, AdmissionError> {
    let found = entries.get(index as usize).copied();
    found.ok_or_else(|| malformed("it instantiates what is not defined before"))
}

fn is_code(kind: ComponentExternalKind) -> bool {
    matches!(kind, ComponentExternalKind::Module | ComponentExternalKind::Component)
}

/// Its size depends on the component that instantiates it, so it cannot be counted.
fn unresolved(name: &str, kind: ComponentExternalKind) -> AdmissionError {
    let what = if kind == ComponentExternalKind::Module { "module" } else { "component" };
    let module = String::new();
    AdmissionError::UnknownImport { module, name: name.to_owned(), what }
}
