"""Whom the sessions of the ModelScope client tell the token."""

import pytest

from rotationzoo.zoo.hubs.modelscope import may_see_token


@pytest.mark.parametrize(
    ("endpoint", "url", "trusted"),
    [
        ("https://modelscope.cn", "https://modelscope.cn/api", True),
        ("https://modelscope.cn", "https://lfs.modelscope.cn/x", True),
        ("https://www.modelscope.ai", "https://lfs.modelscope.ai/x", True),
        ("https://modelscope.cn", "http://modelscope.cn/api", False),
        ("https://modelscope.cn", "http://lfs.modelscope.cn/x", False),
        ("http://modelscope.cn", "https://lfs.modelscope.cn/x", False),
        ("https://modelscope.cn", "https://cdn.modelscope.cn/x", False),
        ("https://modelscope.cn", "https://lfs.modelscope.cn.evil.example/x", False),
        ("https://hub", "https://lfs.hub/x", False),
        ("https://modelscope.cn", "https://modelscope.cn.evil.example/x", False),
        ("https://modelscope.cn", "https://evilmodelscope.cn/x", False),
        ("https://modelscope.cn", "https://modelscope.cn@evil.example/x", False),
        ("https://modelscope.cn", "https://bucket.oss-cn-beijing.aliyuncs.com/x", False),
        ("http://127.0.0.1:80", "http://127.0.0.1:81/x", False),
        ("http://127.0.0.1:80", "http://localhost:80/x", False),
        ("http://127.0.0.1", "http://127.0.0.1:80/x", True),
    ],
)
def test_who_is_told_the_token(endpoint, url, trusted):
    assert may_see_token(endpoint, url) is trusted
