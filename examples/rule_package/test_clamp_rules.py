import torch

import megacpp_compile


def test_two_clamps_become_one():
    def model(x):
        return x.sin().clamp(-0.5, 0.9).clamp(max=0.3)

    x = torch.randn(64, requires_grad=True)
    compiled = torch.compile(model, backend="megacpp", options={"require": {"merge_clamps": 1}, "verify": "each"})
    assert torch.equal(compiled(x), model(x))
    compiled(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad(model(x).sum(), x)[0])
    report = megacpp_compile.explain(lambda x: x.sin().clamp(5, 6).clamp(max=4), x)
    assert [miss.tag for miss in report.misses] == ["bounds"]
