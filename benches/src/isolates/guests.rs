//! The modules that are measured, as text.

/// `sfib(n)`, the recursive Fibonacci function; no memory, no imports.
pub const SFIB: &str = r#"(module (func $f (export "run") (param i32) (result i32)
  (if (result i32) (i32.lt_s (local.get 0) (i32.const 2))
    (then (local.get 0))
    (else (i32.add
      (call $f (i32.sub (local.get 0) (i32.const 1)))
      (call $f (i32.sub (local.get 0) (i32.const 2))))))))"#;

/// Does nothing; no memory.
pub const EMPTY: &str = r#"(module (func (export "run") (param i32) (result i32) (local.get 0)))"#;

/// Writes a word of its one page of memory.
pub const TOUCH: &str = r#"(module (memory 1) (data (i32.const 64) "first content")
  (func (export "run") (param i32) (result i32)
    (i32.store (i32.const 128) (local.get 0)) (i32.load (i32.const 128))))"#;

/// The same without first content.
pub const WRITE: &str = r#"(module (memory 1) (func (export "run") (param i32) (result i32)
  (i32.store (i32.const 128) (local.get 0)) (local.get 0)))"#;

/// The dot product of two vectors of 4096 floats, 4096 times.
pub const DOT: &str = r#"(module (memory 2)
  (func (export "run") (param $times i32) (result i32) (local $i i32) (local $sum f64)
    (loop $fill
      (f64.store (local.get $i) (f64.convert_i32_u (local.get $i)))
      (f64.store offset=32768 (local.get $i) (f64.const 0.5))
      (br_if $fill (i32.lt_u (local.tee $i (i32.add (local.get $i) (i32.const 8))) (i32.const 32768))))
    (loop $again
      (local.set $i (i32.const 0))
      (loop $more
        (local.set $sum (f64.add (local.get $sum)
          (f64.mul (f64.load (local.get $i)) (f64.load offset=32768 (local.get $i)))))
        (br_if $more (i32.lt_u (local.tee $i (i32.add (local.get $i) (i32.const 8))) (i32.const 32768))))
      (br_if $again (local.tee $times (i32.sub (local.get $times) (i32.const 1)))))
    (i32.trunc_sat_f64_s (local.get $sum))))"#;

/// The product of two matrices of n by n floats.
pub const MATMUL: &str = r#"(module (memory 100)
  (func (export "run") (param $n i32) (result i32)
    (local $i i32) (local $j i32) (local $k i32) (local $sum f64) (local $row i32) (local $b i32) (local $c i32)
    (local.set $row (i32.shl (local.get $n) (i32.const 3)))
    (local.set $b (i32.mul (local.get $row) (local.get $n)))
    (local.set $c (i32.shl (local.get $b) (i32.const 1)))
    (loop $fill
      (f64.store (local.get $i) (f64.convert_i32_u (i32.and (local.get $i) (i32.const 255))))
      (br_if $fill (i32.lt_u (local.tee $i (i32.add (local.get $i) (i32.const 8))) (local.get $c))))
    (local.set $i (i32.const 0))
    (loop $rows
      (local.set $j (i32.const 0))
      (loop $columns
        (local.set $k (i32.const 0))
        (local.set $sum (f64.const 0))
        (loop $cells
          (local.set $sum (f64.add (local.get $sum) (f64.mul
            (f64.load (i32.add (i32.mul (local.get $i) (local.get $row)) (i32.shl (local.get $k) (i32.const 3))))
            (f64.load (i32.add (local.get $b)
              (i32.add (i32.mul (local.get $k) (local.get $row)) (i32.shl (local.get $j) (i32.const 3))))))))
          (br_if $cells (i32.lt_u (local.tee $k (i32.add (local.get $k) (i32.const 1))) (local.get $n))))
        (f64.store (i32.add (local.get $c)
            (i32.add (i32.mul (local.get $i) (local.get $row)) (i32.shl (local.get $j) (i32.const 3))))
          (local.get $sum))
        (br_if $columns (i32.lt_u (local.tee $j (i32.add (local.get $j) (i32.const 1))) (local.get $n))))
      (br_if $rows (i32.lt_u (local.tee $i (i32.add (local.get $i) (i32.const 1))) (local.get $n))))
    (i32.trunc_sat_f64_s (local.get $sum))))"#;

/// Never ends.
pub const SPIN: &str = r#"(module (memory 1) (func (export "run") (param i32) (result i32)
  (i32.store (i32.const 128) (local.get 0)) (loop $l (br $l)) (i32.const 0)))"#;

/// Fills a page of the host with words that differ widely, then does what is said.
macro_rules! fill {
    ($then:literal) => {
        concat!(
            r#"(module (memory 1) (func (export "run") (param i32) (result i32)
              (local $i i32) (local $w i64)
              (local.set $w (i64.const 0x9e3779b97f4a7c15))
              (loop $more
                (i64.store (local.get $i) (local.tee $w
                  (i64.add (i64.mul (local.get $w) (i64.const 0xd1342543de82ef95)) (i64.const 1))))
                (br_if $more (i32.lt_u
                  (local.tee $i (i32.add (local.get $i) (i32.const 8))) (i32.const 4096))))"#,
            $then,
            "(local.get 0)))"
        )
    };
}

/// Fills a page.
pub const FILL: &str = fill!("");

/// The same, and never ends.
pub const FILL_SPIN: &str = fill!("(loop $l (br $l))");

/// Never ends, and has no memory.
pub const SPIN_BARE: &str = r#"(module (func (export "run") (param i32) (result i32)
  (loop $l (br $l)) (i32.const 0)))"#;

/// What tenants do to each other: loops, also over what the host does for them, traps, endless
/// recursion, bombs of memory and threads.
pub const ATTACKS: [(&str, &str); 6] = [
    ("loop", SPIN),
    (
        "fill",
        r#"(module (memory 16) (func (export "run") (param i32) (result i32)
          (loop $l (memory.fill (i32.const 0) (local.get 0) (i32.const 0x100000)) (br $l))
          (i32.const 0)))"#,
    ),
    ("trap", r#"(module (func (export "run") (param i32) (result i32) unreachable))"#),
    (
        "recursion",
        r#"(module (func $f (export "run") (param i32) (result i32)
          (i32.add (call $f (local.get 0)) (i32.const 1))))"#,
    ),
    (
        "memory",
        r#"(module (memory 1) (func (export "run") (param $page i32) (result i32)
          (loop $more
            (local.set $page (memory.grow (i32.const 1)))
            (if (i32.eq (local.get $page) (i32.const -1)) (then unreachable))
            (i32.store (i32.shl (local.get $page) (i32.const 16)) (i32.const 1))
            (br $more))
          (i32.const 0)))"#,
    ),
    (
        "threads",
        r#"(module
          (import "env" "memory" (memory 1 4 shared))
          (import "wasi" "thread-spawn" (func $spawn (param i32) (result i32)))
          (func $again (loop $more (drop (call $spawn (i32.const 0))) (br $more)))
          (func (export "wasi_thread_start") (param i32 i32) (call $again))
          (func (export "run") (param i32) (result i32) (call $again) (i32.const 0)))"#,
    ),
];
