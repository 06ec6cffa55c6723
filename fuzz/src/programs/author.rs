//! A writer of Wasm programs: from any bytes a module that is valid and does anything.

use crate::Input;

/// Values that Wasm computes with, as they are written in [`OPERATIONS`] and in text.
const TYPES: [(char, &str); 4] = [('i', "i32"), ('I', "i64"), ('f', "f32"), ('F', "f64")];
/// What there is to compute: operands, result, names. Some trap, on some operands.
const OPERATIONS: [(&str, char, &str); 18] = [
    ("ii", 'i', "add sub mul and or xor shl shr_s shr_u rotl rotr eq ne lt_s ge_u"),
    ("ii", 'i', "div_s div_u rem_s rem_u"),
    ("i", 'i', "clz ctz popcnt eqz extend8_s extend16_s"),
    ("II", 'I', "add sub mul and or xor shl shr_s rotl div_s div_u rem_s rem_u"),
    ("I", 'I', "clz ctz popcnt extend8_s extend32_s"),
    ("ff", 'f', "add sub mul div min max copysign"),
    ("f", 'f', "abs neg ceil floor trunc nearest sqrt"),
    ("FF", 'F', "add sub mul div min max copysign"),
    ("F", 'F', "abs neg ceil floor trunc nearest sqrt"),
    ("I", 'i', "wrap_i64"),
    ("f", 'i', "trunc_f32_s trunc_f32_u trunc_sat_f32_s reinterpret_f32"),
    ("F", 'i', "trunc_f64_s trunc_sat_f64_u"),
    ("i", 'I', "extend_i32_s extend_i32_u"),
    ("F", 'I', "trunc_f64_s trunc_sat_f64_s reinterpret_f64"),
    ("i", 'f', "convert_i32_s convert_i32_u reinterpret_i32"),
    ("F", 'f', "demote_f64"),
    ("I", 'F', "convert_i64_s convert_i64_u reinterpret_i64"),
    ("f", 'F', "promote_f32"),
];
/// Constants that are more often wrong than others.
const NUMBERS: [&str; 8] = ["0", "1", "-1", "7", "65535", "65536", "2147483647", "-2147483648"];
/// Expressions of a module, and how deep they nest.
const NODES_MAX: usize = 600;
const DEPTH_MAX: usize = 8;
const FUNCTIONS_MAX: usize = 5;

/// A function's parameters and result.
pub struct Signature {
    pub parameters: String,
    result: char,
}

/// A module as text, and the signatures of its functions `0`, `1`, ...
pub fn program(input: &mut Input<'_>) -> (String, Vec<Signature>) {
    let signatures = (0..=usize::from(input.u8()) % FUNCTIONS_MAX).map(|_| signature(input));
    let signatures: Vec<Signature> = signatures.collect();
    let mut author = Author { input, signatures: &signatures, nodes: 0, labels: 0 };
    let functions: String = (0..signatures.len()).map(|index| author.function(index)).collect();
    let count = signatures.len();
    let all: String = (0..count).map(|index| format!(" {index}")).collect();
    let globals: String =
        TYPES.map(|(ty, name)| format!("(global $g{ty} (mut {name}) ({name}.const 3))")).concat();
    let text = format!(
        "(module (memory (export \"memory\") 1 100) (data (i32.const 16) \"some content\")
         (table {count} {} funcref) (elem (i32.const 0) func{all}) {globals}\n{functions})",
        count + 9
    );
    (text, signatures)
}

fn signature(input: &mut Input<'_>) -> Signature {
    let byte = usize::from(input.u8());
    let pick = |shift: usize| TYPES[(byte >> shift) & 3].0;
    let parameters = (0..(byte >> 6) % 3).map(|index| pick(2 * index)).collect();
    Signature { parameters, result: pick(4) }
}

fn word(ty: char) -> &'static str {
    TYPES.iter().find(|(name, _)| *name == ty).map_or("i32", |(_, word)| word)
}

struct Author<'a, 'b> {
    input: &'a mut Input<'b>,
    signatures: &'a [Signature],
    nodes: usize,
    labels: usize,
}

impl Author<'_, '_> {
    fn below(&mut self, limit: usize) -> usize {
        usize::from(self.input.u8()) % limit.max(1)
    }

    /// Locals of each type follow the parameters: `$i`, `$I`, `$f`, `$F`.
    fn function(&mut self, index: usize) -> String {
        let Signature { parameters, result } = &self.signatures[index];
        let types: String = parameters.chars().map(|ty| format!(" {}", word(ty))).collect();
        let locals = TYPES.map(|(ty, name)| format!("(local ${ty} {name})")).concat();
        let takes: String = parameters
            .chars()
            .enumerate()
            .map(|(at, ty)| format!("(local.set ${ty} (local.get {at}))"))
            .collect();
        let (statements, value) = (self.statements(0), self.value(*result, 0));
        let result = word(*result);
        format!(
            "(func (export \"{index}\") (param{types}) (result {result}) {locals} {takes}
             {statements} {value})\n"
        )
    }

    fn statements(&mut self, depth: usize) -> String {
        (0..self.below(5)).map(|_| self.statement(depth + 1)).collect()
    }

    fn is_enough(&mut self, depth: usize) -> bool {
        self.nodes += 1;
        depth >= DEPTH_MAX || self.nodes >= NODES_MAX || self.input.is_empty()
    }

    fn statement(&mut self, depth: usize) -> String {
        if self.is_enough(depth) {
            return String::new();
        }
        let ty = TYPES[self.below(4)].0;
        let more = depth + 1;
        match self.below(12) {
            0..=2 => format!("(local.set ${ty} {})", self.value(ty, more)),
            3 => format!("(global.set $g{ty} {})", self.value(ty, more)),
            4 | 5 => {
                format!("({}.store {} {})", word(ty), self.address(more), self.value(ty, more))
            }
            6 => format!("(drop {})", self.value(ty, more)),
            7 => self.repeat(more),
            8 => {
                let condition = self.value('i', more);
                format!(
                    "(if {condition} (then {}) (else {}))",
                    self.statements(more),
                    self.statements(more)
                )
            }
            9 => self.bulk(more),
            10 => "(if (i32.eqz (local.get $i)) (then unreachable))".to_owned(),
            _ => {
                let grown = self.value('i', more);
                format!("(drop (table.grow 0 (ref.null func) {grown}))")
            }
        }
    }

    /// A loop that may have no end.
    fn repeat(&mut self, depth: usize) -> String {
        self.labels += 1;
        let label = self.labels;
        let (body, condition) = (self.statements(depth), self.value('i', depth));
        format!("(loop $l{label} {body} (br_if $l{label} {condition}))")
    }

    fn bulk(&mut self, depth: usize) -> String {
        let name = if self.below(2) == 0 { "fill" } else { "copy" };
        let [to, from, count] = [0; 3].map(|_| self.address(depth));
        format!("(memory.{name} {to} {from} {count})")
    }

    /// Most are below the first page's end, some are anywhere.
    fn address(&mut self, depth: usize) -> String {
        let value = self.value('i', depth);
        if self.below(8) == 0 { value } else { format!("(i32.and {value} (i32.const 0x7fff))") }
    }

    fn value(&mut self, ty: char, depth: usize) -> String {
        if self.is_enough(depth) {
            return format!("({}.const {})", word(ty), NUMBERS[self.below(4)]);
        }
        let more = depth + 1;
        match self.below(16) {
            0 => format!("({}.const {})", word(ty), NUMBERS[self.below(NUMBERS.len())]),
            1 | 2 => format!("(local.get ${ty})"),
            3 => format!("(global.get $g{ty})"),
            4 => format!("(local.tee ${ty} {})", self.value(ty, more)),
            5 => self.choice(ty, more),
            6 => format!(
                "(block (result {}) {} {})",
                word(ty),
                self.statements(more),
                self.value(ty, more)
            ),
            7 => self.call(ty, more),
            8 if ty == 'i' => format!("(memory.grow {})", self.value('i', more)),
            8 if ty == 'F' => self.vector(more),
            9 => format!("({}.load {})", word(ty), self.address(more)),
            _ => self.operation(ty, more),
        }
    }

    fn choice(&mut self, ty: char, depth: usize) -> String {
        let [yes, no] = [0; 2].map(|_| self.value(ty, depth));
        let condition = self.value('i', depth);
        match self.below(2) {
            0 => format!("(select {yes} {no} {condition})"),
            _ => format!("(if (result {}) {condition} (then {yes}) (else {no}))", word(ty)),
        }
    }

    fn operation(&mut self, ty: char, depth: usize) -> String {
        let fitting: Vec<_> = OPERATIONS.iter().filter(|(_, result, _)| *result == ty).collect();
        let (operands, _, names) = fitting[self.below(fitting.len())];
        let names: Vec<&str> = names.split(' ').collect();
        let name = names[self.below(names.len())];
        let operands: String = operands.chars().map(|ty| self.value(ty, depth)).collect();
        format!("({}.{name} {operands})", word(ty))
    }

    fn vector(&mut self, depth: usize) -> String {
        let [one, two] = [0; 2].map(|_| self.value('F', depth));
        format!("(f64x2.extract_lane 1 (f64x2.mul (f64x2.splat {one}) (f64x2.splat {two})))")
    }

    /// A call of a function with this result, direct or through the table; it may be itself.
    fn call(&mut self, ty: char, depth: usize) -> String {
        let fitting = |(_, signature): &(usize, &Signature)| signature.result == ty;
        let fitting: Vec<_> = self.signatures.iter().enumerate().filter(fitting).collect();
        let Some((index, signature)) = fitting.get(self.below(fitting.len())) else {
            return format!("(local.get ${ty})");
        };
        let parameters = &signature.parameters;
        let arguments: String = parameters.chars().map(|ty| self.value(ty, depth)).collect();
        if self.below(3) > 0 {
            return format!("(call {index} {arguments})");
        }
        let types: String = parameters.chars().map(|ty| format!(" {}", word(ty))).collect();
        let at = self.value('i', depth);
        format!("(call_indirect (param{types}) (result {}) {arguments} {at})", word(ty))
    }
}
